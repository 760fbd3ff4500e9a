"""What the compiler says of every Triton kernel for sm_80, sm_90 and sm_100; needs Triton, but no card."""

from __future__ import annotations

import importlib.metadata
import subprocess
from collections.abc import Iterator

from .compiler import MATRIX, PROCESSORS, RESOURCE_FIELDS, Launch, compiled, launches, resources, selections, tools
from .setting import Case, NotRunError, Row, Setting

FIELDS = ("capability", "kernel", "tiles", *RESOURCE_FIELDS, "triton", "ptxas")
SIZES = (4096, 8192)  # so wide that ptxas does not unroll the loops, which takes it long


def cases(setting: Setting) -> Iterator[Case]:
    """Yield every launch of a layer, in every tile that the tuner tries, then those of selection, for each GPU."""
    try:
        tools()
        every = every_launch(setting)
    except NotRunError as reason:
        why = str(reason)
        yield Case("compile", lambda: refuse(why), 0)
        return
    for capability in setting.pick(tuple(PROCESSORS), (90,)):
        for launch, tiles, options in every:
            name = f"sm_{capability} {launch}{told(tiles, options)}"
            call = lambda c=capability, launch=launch, t=tiles, o=options: measure(launch, c, t, o)  # noqa: E731
            yield Case(name, call, 10)


def every_launch(setting: Setting) -> list[tuple[Launch, dict[str, int], dict[str, int]]]:
    """Return launches with tiles and options; in a dry run the two that compile quickly."""
    from expert_threshold.kernels.gpu.experts import CONFIGS

    d_model, d_expert = SIZES
    found = []
    seen = set()
    for launch in [*launches(d_model, d_expert, 16), *selections()]:
        if (key := str(launch)) in seen and not launch.is_product:
            continue
        seen.add(key)
        ways = CONFIGS if launch.is_product else [None]
        for way in ways:
            options = {} if way is None else {"num_warps": way.num_warps, "num_stages": way.num_stages}
            found.append((launch, {} if way is None else dict(way.kwargs), options))
    if setting.dry:
        return [each for each in found if each[0].name in ("spread_gates", "sum_by_token")]
    return sorted(found, key=lambda each: each[1] != dict(CONFIGS[0].kwargs))


def told(tiles: dict[str, int], options: dict[str, int]) -> str:
    if not tiles:
        return ""
    return f" {tiles['tile_m']}x{tiles['tile_n']}, {options['num_warps']} warps, {options['num_stages']} stages"


def refuse(why: str) -> Row:
    raise NotRunError(why)


def measure(launch: Launch, capability: int, tiles: dict[str, int], options: dict[str, int]) -> Row:
    """Compile one launch for one GPU."""
    row = resources(compiled(launch, capability, tiles, **options), capability)
    sizes = {key: value for key, value in launch.constants.items() if isinstance(value, int)}
    return {
        "capability": capability,
        "kernel": str(launch),
        "constants": sizes,
        "tiles": told(tiles, options).strip(),
        **row,
        "triton": importlib.metadata.version("triton"),
        "ptxas": ptxas(capability),
    }


def ptxas(capability: int) -> str:
    """Return the version of the assembler that Triton calls for a compute capability."""
    name = "ptxas-blackwell" if capability >= 100 and (tools() / "ptxas-blackwell").exists() else "ptxas"
    said = subprocess.run([tools() / name, "--version"], capture_output=True, text=True, check=True).stdout
    return said.split("release ")[1].split(",")[0]


def lines(rows: dict[str, Row]) -> list[str]:
    """Return, for each GPU, how many kernels spill or cannot run, and the lowest occupancy."""
    found = []
    for capability in PROCESSORS:
        of_gpu = [row for row in rows.values() if row["capability"] == capability]
        if of_gpu:
            spilling = sum(row["stack_bytes"] > 0 for row in of_gpu)
            too_large = sum(row["blocks_per_processor"] == 0 for row in of_gpu)
            multiply = sum(row["matrix_instructions"] > 0 for row in of_gpu)
            found.append(
                f"sm_{capability}: {len(of_gpu)} compiled, {multiply} with {MATRIX[capability]}, {spilling} spill, "
                f"{too_large} need more shared memory than there is"
            )
    return found


def to_markdown(rows: dict[str, Row]) -> str:
    """Return a table of all rows, for the docs."""
    names = ("capability", "kernel", "tiles", *RESOURCE_FIELDS)
    head = [" | ".join(names), " | ".join("---" for _ in names)]
    body = [" | ".join(str(row[name]) for name in names) for row in rows.values()]
    return "".join(f"| {line} |\n" for line in [*head, *body])

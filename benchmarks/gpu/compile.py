"""Compile every Triton kernel for sm_80, sm_90 and sm_100 and report its resources; needs Triton but no card."""

from __future__ import annotations

import importlib.metadata
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from .compiler import MATRIX, PROCESSORS, RESOURCE_FIELDS, Launch, compiled, launches, resources, selections, tools
from .setting import Case, NotRunError, Row, Setting

FIELDS = ("capability", "kernel", "tiles", *RESOURCE_FIELDS, "triton", "ptxas")
Way = tuple[Launch, dict[str, int], dict[str, int]]
SIZES = (4096, 8192)  # so wide that ptxas does not unroll the loops, which takes it long


def cases(setting: Setting) -> Iterator[Case]:
    """Yield every launch of a layer and of selection for each GPU, in the tuner's first tiles, then in the others."""
    try:
        tools()
    except NotRunError as reason:
        why = str(reason)
        yield Case("compile", lambda: refuse(why), 0)
        return
    for launch, tiles, options in ways(setting):
        for capability in setting.pick(tuple(PROCESSORS), (90,)):
            name = f"sm_{capability} {launch}{told(tiles, options)}"
            call = partial(measure, launch, capability, tiles, options)
            yield Case(name, call, 10)


def ways(setting: Setting) -> list[Way]:
    """Return launches with tiles and options, the tuner's first choice first; in a dry run two that compile quickly."""
    from expert_threshold.kernels.gpu.experts import CONFIGS

    every = {str(launch): launch for launch in [*launches(*SIZES, 16), *selections()]}.values()
    if setting.dry:
        return [(launch, {}, {}) for launch in every if launch.name in ("spread_gates", "sum_by_token")]
    found: list[Way] = []
    for number, config in enumerate(CONFIGS):
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        found += [(launch, dict(config.kwargs), options) for launch in every if launch.is_product]
        if number == 0:
            found += [(launch, {}, {}) for launch in every if not launch.is_product]
    return found


def first_rows(capability: int) -> list[Row]:
    """Compile every launch for one GPU in the tuner's first tiles. Raises NotRunError without the tools."""
    tools()
    setting = Setting(Path(), dry=False, cuda=False, data="")
    first = ways(setting)[0]
    return [measure(launch, capability, tiles, options) for launch, tiles, options in ways(setting)
            if not tiles or (tiles, options) == first[1:]]  # fmt: skip


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


def to_markdown(rows: dict[str, Row], facts: Row) -> str:
    """Return a table of all rows, under a line about what made them."""
    assemblers = sorted({row["ptxas"] for row in rows.values()})
    origin = f"Triton {facts['triton']}, ptxas {' and '.join(assemblers)}, torch {facts['torch']}; commit "
    origin += f"{facts['commit']}, {facts['date']}; no card."
    names = ("capability", "kernel", "tiles", *RESOURCE_FIELDS)
    body = [[str(row[name]) for name in names] for row in rows.values()]
    table = [names, ["---"] * len(names), *body]
    return f"# Triton's kernels by the compiler\n\n{origin}\n\n" + "".join(f"| {' | '.join(c)} |\n" for c in table)

"""Compile every Triton kernel, as the package launches it, for GPUs that need not be here, and report its resources.

Registers, stack and static shared memory are read off the machine code by `cuobjdump -res-usage`, which Triton brings;
dynamic shared memory is in the compiler's metadata. The stack is local memory of each thread, where spilled registers
go: 0 bytes say that nothing is spilled.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from expert_threshold.kernels.segments import Segments

from .setting import Case, NotRunError, Row, Setting

PROCESSORS = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""The most shared memory of a block in bytes, by compute capability (CUDA C++ Programming Guide)."""
MATRIX = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
"""The instruction that multiplies matrices, by compute capability, as PTX spells it."""


class Launch(NamedTuple):
    """A kernel with its arguments, on the meta device. is_product: the tuner chooses its tiles."""

    name: str
    kernel: Any
    arguments: tuple[Tensor | float | None, ...]
    constants: dict[str, Any]
    is_product: bool = False
    options: dict[str, int] = {}  # noqa: RUF012  of the compiler
    tiles: str = ""

    def __str__(self) -> str:
        shown = [
            f"{key}={self.constants.get(key)}" for key in SHOWN if self.constants.get(key) not in (None, "", False)
        ]
        return " ".join([self.name, *shown])

    def tuned(self, config: Any) -> Launch:
        """Return a product with a configuration of the tuner."""
        tiles, options = config.kwargs, {"num_warps": config.num_warps, "num_stages": config.num_stages}
        shown = f"{tiles['tile_m']}x{tiles['tile_n']}, {config.num_warps} warps, {config.num_stages} stages"
        return self._replace(constants=self.constants | tiles, options=options, tiles=shown)


SHOWN = "d_in", "d_left", "out_in", "epilogue", "gathered", "gather_left", "gated", "below", "with_gradient"


def launches(d_model: int, d_expert: int, experts: int, tokens: int = 256) -> list[Launch]:
    """Return every launch of forward and backward of relu² experts in bfloat16, without launching any."""
    from expert_threshold.kernels.gpu import experts as kernels

    found: list[Launch] = []

    def launch(kernel: Any, grid: Any, *arguments: Tensor | int | None, **constants: Any) -> None:
        found.append(Launch(kernel.__name__, kernel, arguments, constants))

    def launch_product(kernel: Any, grid: Any, *arguments: Tensor | int | None, **constants: Any) -> None:
        more = {"tile_k": kernels.DEPTH, "upcast": False}
        found.append(Launch(kernel.__name__, kernel, arguments, constants | more, is_product=True))

    with torch.device("meta"), mock.patch.multiple(kernels, _launch=launch, _launch_product=launch_product):
        x = torch.empty(tokens, d_model, dtype=torch.bfloat16)
        up = torch.empty(experts, d_expert, d_model, dtype=torch.bfloat16)
        down = torch.empty(experts, d_model, d_expert, dtype=torch.bfloat16)
        gates = torch.empty(tokens, experts)
        index = torch.empty(tokens, dtype=torch.int64)
        of_token = torch.empty(tokens + 1, dtype=torch.int64)
        packed = Segments(index, index, torch.empty(experts, dtype=torch.int32), index, of_token)
        y, kept = kernels._forward(x, gates, packed, up, down)
        kernels._backward(y, x, gates, packed, up, down, kept)
    return found


def selections(tokens: int = 65_536, experts: int = 16, ks: int = 3) -> list[Launch]:
    """Return the launches of the first and the last round of radix selection."""
    from expert_threshold.routing import radix

    found = []
    with torch.device("meta"):
        scores, counts = torch.empty(1, tokens, experts), torch.empty(1, dtype=torch.int32)
        prefixes = torch.empty(1, dtype=torch.int64)
    tile = {"tile_tokens": radix.TILE // experts, "tile_experts": experts}
    for below, bits in (radix.SCORE_DIGITS[0], radix.INDEX_DIGITS[-1]):
        digit = {"below": below, "bits": bits, "ks": ks, "copies": radix.MAX_COPIES}
        sizes = (tokens, experts, tokens * experts, experts, 1)
        counted = (scores, prefixes, counts, *sizes)
        found.append(Launch("radix _count_digits", radix._count_digits, counted, digit | tile))
        found.append(Launch("radix _take_digit", radix._take_digit, (counts, counts, prefixes), digit))
    return found


def losses(rows: int = 256, vocab: int = 65_536) -> list[Launch]:
    """Return the launch of the head's loss, with its gradient and without."""
    from expert_threshold.kernels.gpu import cross_entropy as kernels

    with torch.device("meta"):
        logits, wanted = torch.empty(rows, vocab, dtype=torch.bfloat16), torch.empty(rows, dtype=torch.int64)
        arguments = (logits, wanted, torch.empty(rows), vocab, 15.0)
    constants = {"tile": kernels.TILE}
    launch = Launch("softmax_slopes", kernels.softmax_slopes_of_row, arguments, constants)
    launch = launch._replace(options={"num_warps": kernels.WARPS})
    return [launch._replace(constants=constants | {"with_gradient": gradient}) for gradient in (True, False)]


def compiled(launch: Launch, capability: int) -> Any:
    """Compile a launch for a compute capability, 90 for 9.0; every tensor is taken to be aligned, as torch's are."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    constants, every = dict(launch.constants), launch.kernel.arg_names
    names = [name for name in every if name not in constants]
    signature, aligned = dict.fromkeys(every, "constexpr"), {}
    for name, value in zip(names, launch.arguments, strict=True):
        if value is None:
            constants[name] = None
            continue
        is_tensor = isinstance(value, Tensor)
        signature[name] = "*" + TYPES[value.dtype] if is_tensor else "fp32" if isinstance(value, float) else "i32"
        if is_tensor or (signature[name] == "i32" and value % 16 == 0):
            aligned[(every.index(name),)] = [["tt.divisibility", 16]]
    by_place = {(every.index(name),): value for name, value in constants.items()}
    source = ASTSource(launch.kernel, signature, by_place, aligned)
    options = {"enable_fp_fusion": True, **launch.options}
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}


def tools() -> Path:
    """Return the folder of Triton's ptxas and cuobjdump. Raises NotRunError where they are absent."""
    try:
        import triton
    except ImportError:
        raise NotRunError("triton is not installed") from None
    if triton.knobs.runtime.interpret:
        raise NotRunError("triton was imported with TRITON_INTERPRET=1; this needs a process of its own")
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    if not all((folder / tool).exists() for tool in ("ptxas", "cuobjdump")):
        raise NotRunError("this triton brings no ptxas or cuobjdump")
    return folder


def resources(result: Any, capability: int) -> Row:
    """Return what a compiled kernel needs of a multiprocessor."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        command = [tools() / "cuobjdump", "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", said)}
    shared = max(usage["SHARED"], result.metadata.shared)
    return {
        "registers": usage["REG"],
        "stack_bytes": usage["STACK"] + usage["LOCAL"],
        "shared_bytes": shared,
        "warps": result.metadata.num_warps,
        "fits": shared <= PROCESSORS[capability],
        "matrix_instructions": result.asm["ptx"].count(MATRIX[capability]),
    }


SIZES = (4096, 8192)  # so wide that ptxas does not unroll the loops, which takes it long
FINE = (1280, 160)  # widths of many narrow experts, no multiples of the tiles


def cases(setting: Setting) -> Iterator[Case]:
    """Yield every launch for each GPU, products in the tuner's first tiles, then in the others."""
    try:
        tools()
    except NotRunError:
        yield Case("compile", tools, 0)  # type: ignore[arg-type]  raises, which records why
        return
    for launch in every_launch(setting.dry):
        for capability in setting.pick(tuple(PROCESSORS), (90,)):
            name = " ".join(filter(None, [f"sm_{capability}", str(launch), launch.tiles]))
            yield Case(name, partial(measure, launch, capability), 10)


def every_launch(dry: bool) -> list[Launch]:
    """Return the launches, the tuner's first choice first; in a dry run two that compile quickly."""
    from expert_threshold.kernels.gpu.experts import CONFIGS

    every = [*{str(launch): launch for launch in [*launches(*SIZES, 16), *selections(), *losses()]}.values()]
    if dry:
        return [launch for launch in every if launch.name in ("spread_gates", "sum_by_token")]
    products = [launch for launch in every if launch.is_product]
    fine = [launch for launch in launches(*FINE, 64) if launch.is_product]
    first = [launch.tuned(CONFIGS[0]) for launch in [*products, *fine]]
    others = [launch.tuned(config) for config in CONFIGS[1:] for launch in products]
    return [*first, *(launch for launch in every if not launch.is_product), *others]


def measure(launch: Launch, capability: int) -> Row:
    """Compile one launch for one GPU."""
    about = {"capability": capability, "kernel": str(launch), "tiles": launch.tiles}
    return about | resources(compiled(launch, capability), capability)


def lines(rows: dict[str, Row]) -> list[str]:
    """Return, for each GPU, how many kernels spill or cannot run."""
    found = []
    for capability in PROCESSORS:
        of_gpu = [row for row in rows.values() if row["capability"] == capability]
        if of_gpu:
            spilling = sum(row["stack_bytes"] > 0 for row in of_gpu)
            too_large = sum(not row["fits"] for row in of_gpu)
            multiply = sum(row["matrix_instructions"] > 0 for row in of_gpu)
            found.append(
                f"sm_{capability}: {len(of_gpu)} compiled, {multiply} with {MATRIX[capability]}, {spilling} spill, "
                f"{too_large} need more shared memory than there is"
            )
    return found


def to_markdown(rows: dict[str, Row], facts: Row) -> str:
    """Return a table of all rows, under a line about what made them."""
    origin = f"Triton {facts['triton']}, torch {facts['torch']}; commit {facts['commit']}, {facts['date']}; no card."
    names = [name for name in next(iter(rows.values())) if name not in ("status", "seconds")]
    table = [names, ["---"] * len(names), *([str(row[name]) for name in names] for row in rows.values())]
    return f"# Triton's kernels by the compiler\n\n{origin}\n\n" + "".join(f"| {' | '.join(c)} |\n" for c in table)

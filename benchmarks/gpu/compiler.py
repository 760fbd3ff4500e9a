"""Triton kernels as the package launches them, compiled for GPUs that need not be here, and what the compiler says.

Registers, stack and static shared memory are read off the machine code by `cuobjdump -res-usage`, which Triton brings;
dynamic shared memory is in the compiler's metadata. The stack is local memory of each thread, where spilled registers
go: 0 bytes say that nothing is spilled. Occupancy is theoretical, from NVIDIA's CUDA C++ Programming Guide, table
"Technical Specifications per Compute Capability".
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from expert_threshold.kernels.segments import Segments

from .setting import NotRunError, Row


class Processor(NamedTuple):
    """The resources of one multiprocessor: bytes of shared memory, in total and per block; warps and blocks."""

    shared: int
    of_block: int
    warps: int
    blocks: int


PROCESSORS = {
    80: Processor(164 << 10, 163 << 10, 64, 32),
    90: Processor(228 << 10, 227 << 10, 64, 32),
    100: Processor(228 << 10, 227 << 10, 64, 32),
}
REGISTERS = 65_536
REGISTERS_AT_ONCE = 256  # given to a warp in units of this
RESERVED = 1 << 10  # bytes of shared memory that the system takes for each block
MATRIX = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
"""The instruction that multiplies matrices, by compute capability, as PTX spells it."""


class Launch(NamedTuple):
    """A kernel with its arguments, on the meta device. is_product: its tiles are chosen, see `tiles`."""

    name: str
    kernel: Any
    arguments: tuple[Tensor | int | None, ...]
    constants: dict[str, Any]
    is_product: bool

    def __str__(self) -> str:
        told = {
            key: self.constants[key]
            for key in ("d_in", "d_left", "out_in", "epilogue", "gathered", "gather_left", "gated", "below")
            if key in self.constants
        }
        return " ".join([self.name, *(f"{key}={value}" for key, value in told.items() if value not in ("", False))])


def launches(d_model: int, d_expert: int, experts: int, tokens: int = 256) -> list[Launch]:
    """Return every launch of forward and backward of relu² experts in bfloat16, without launching any."""
    from expert_threshold.kernels.gpu import experts as kernels

    found: list[Launch] = []

    def launch(kernel: Any, grid: Any, *arguments: Tensor | int | None, **constants: Any) -> None:
        found.append(Launch(kernel.__name__, kernel, arguments, constants, is_product=False))

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
        found.append(
            Launch("_count_digits", radix._count_digits, (scores, prefixes, counts, *sizes), digit | tile, False)
        )
        found.append(Launch("_take_digit", radix._take_digit, (counts, counts, prefixes), digit, False))
    return [launch._replace(name=f"radix {launch.name}") for launch in found]


def compiled(launch: Launch, capability: int, tiles: dict[str, int], **options: int) -> Any:
    """Compile a launch for a compute capability, 90 for 9.0; every tensor is taken to be aligned, as torch's are."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    constants = launch.constants | tiles
    names = [name for name in launch.kernel.arg_names if name not in constants]
    signature, aligned = dict.fromkeys(launch.kernel.arg_names, "constexpr"), {}
    for name, value in zip(names, launch.arguments, strict=True):
        if value is None:
            constants[name] = None
        elif isinstance(value, Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            aligned[(launch.kernel.arg_names.index(name),)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if value % 16 == 0:
                aligned[(launch.kernel.arg_names.index(name),)] = [["tt.divisibility", 16]]
    by_place = {(launch.kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(launch.kernel, signature, by_place, aligned)
    return compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": True, **options})


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
    """Return what a compiled kernel takes of a multiprocessor, and how many of its warps can be there at a time."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        command = [tools() / "cuobjdump", "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", said)}
    shared = max(usage["SHARED"], result.metadata.shared)
    blocks = resident_blocks(usage["REG"], shared, result.metadata.num_warps, capability)
    return {
        "registers": usage["REG"],
        "stack_bytes": usage["STACK"] + usage["LOCAL"],
        "shared_bytes": shared,
        "warps": result.metadata.num_warps,
        "blocks_per_processor": blocks,
        "occupancy": round(blocks * result.metadata.num_warps / PROCESSORS[capability].warps, 4),
        "matrix_instructions": result.asm["ptx"].count(MATRIX[capability]),
    }


RESOURCE_FIELDS = (
    "registers", "stack_bytes", "shared_bytes", "warps", "blocks_per_processor", "occupancy", "matrix_instructions",
)  # fmt: skip


def resident_blocks(registers: int, shared: int, warps: int, capability: int) -> int:
    """Return how many blocks fit a multiprocessor by registers, shared memory, warps and blocks; 0: none can run.

    registers: of a thread. shared: bytes of a block.
    """
    processor = PROCESSORS[capability]
    if shared > processor.of_block:
        return 0
    of_warp = -(-registers * 32 // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE
    by_registers = REGISTERS // of_warp // warps
    return min(by_registers, processor.shared // (shared + RESERVED), processor.warps // warps, processor.blocks)

"""C++ kernels for CPUs.

They multiply bfloat16 matrices block by block, where PyTorch's operations would send each intermediate through memory.
The decoder's kernel is a whole step, of hundreds of operations on a few numbers each. Without a compiler or a suitable
CPU, PyTorch's operations compute the same.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from .. import operator, switched_off
from .build import FLAGS, load, why_not

FOLDER, TORCH = Path(__file__).parent, Path(torch.__file__).parent
DECODER, BLOCKS, OPERATORS = FOLDER / "decode.cpp", FOLDER / "blocks.cpp", FOLDER / "operators.h"
PARTS = sorted({*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h")} - {DECODER, BLOCKS})  # included by BLOCKS
HEADERS = ["-isystem", str(TORCH / "include")]
BLOCKS_FLAGS = [*FLAGS, *HEADERS, "-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512"]
DECODER_FLAGS = [*FLAGS, *HEADERS, "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
LIBRARIES = [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
TILE = 32  # matrix sizes must be multiples of it, since CPUs multiply in tiles


@operator()
def block_products() -> bool:
    """Return True if this PyTorch multiplies blocks of bfloat16 on this processor."""
    raise NotImplementedError


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the kernels, whether or not they are `off`; None if they cannot run, see `reason`.

    The first call takes five seconds.
    """
    kernels = _built() if _multiplies_bfloat16() else None
    return kernels if kernels is not None and block_products() else None


@functools.cache
def _built() -> ctypes.CDLL | None:
    """Return the built kernels, even if this PyTorch lacks the block products they need; None if the build failed."""
    return load(BLOCKS, PARTS, BLOCKS_FLAGS, LIBRARIES)


@functools.cache
def decoder() -> ctypes.CDLL | None:
    """Return the decoder's kernels, a separate library since any CPU can run them; None if they cannot be built."""
    return load(DECODER, [OPERATORS], DECODER_FLAGS, LIBRARIES)


def available() -> bool:
    """Return True if the library can run and is not switched off."""
    return switched_off() is None and library() is not None


# As torch.compiler.assume_constant_result does, but without importing the whole compiler.
available._dynamo_marked_constant = True  # type: ignore[attr-defined]


def reason() -> str | None:
    """Return why kernels are not `available`, with a remedy if there is one; None if they are."""
    if available():
        return None
    if (why := switched_off()) is not None:
        return why
    if not _multiplies_bfloat16():
        return "this processor does not multiply bfloat16 (AVX-512 BF16 or AMX)"
    if (why := why_not(BLOCKS)) is not None:
        return why
    return "this PyTorch has no bfloat16 block products on this processor; check ONEDNN_MAX_CPU_ISA, if it is set"


def _multiplies_bfloat16() -> bool:
    return bool(torch.cpu.get_capabilities().get("avx512_bf16", False))

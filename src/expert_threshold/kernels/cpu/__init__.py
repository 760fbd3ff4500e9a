"""Kernels for processors, in C++.

They multiply bfloat16 matrices block by block where PyTorch's operations would send each intermediate through memory;
and a decoder's is a whole step, of hundreds of operations on a few numbers each. Each has a caller that does the same
by PyTorch's operations where there is no compiler, or another processor.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from .. import switched_off
from .build import FLAGS, load, missing

DECODER = Path(__file__).parent / "decode.cpp"
SOURCES = sorted({*Path(__file__).parent.glob("*.cpp")} - {DECODER})
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
TORCH = Path(torch.__file__).parent
BLOCKS = [*FLAGS, "-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512", "-isystem", str(TORCH / "include")]
DECODING = [*FLAGS, "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
TILE = 32  # sizes of matrices that processors multiply in tiles are multiples of it
FEWEST_ROWS = 64  # with fewer, a call and what it packs cost more than they save


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the kernels, or None where they cannot run, `reason` tells why; `off` changes nothing here.

    Takes five seconds the first time.
    """
    kernels = _built() if _multiplies_bfloat16() else None
    return kernels if kernels is not None and kernels.et_works() else None


@functools.cache
def _built() -> ctypes.CDLL | None:
    """Return the kernels, whether or not PyTorch multiplies blocks for them."""
    kernels = load([*SOURCES, *HEADERS], BLOCKS, [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10"])
    if kernels is not None:
        kernels.et_works.restype, kernels.et_padded.restype = ctypes.c_bool, ctypes.c_int64
    return kernels


@functools.cache
def decoder() -> ctypes.CDLL | None:
    """Return the decoder's kernels, apart, since any processor can run them; None where they cannot be built."""
    return load([DECODER], DECODING, [])


def available() -> bool:
    """Return True if there is a library, and it is not switched off."""
    return switched_off() is None and library() is not None


# What torch.compiler.assume_constant_result does, but for importing the whole compiler.
available._dynamo_marked_constant = True  # type: ignore[attr-defined]


def reason() -> str | None:
    """Return why kernels are not `available`, with the remedy where there is one; None where they are."""
    if available():
        return None
    if (why := switched_off()) is not None:
        return why
    if not _multiplies_bfloat16():
        return "this processor does not multiply bfloat16 (AVX-512 BF16 or AMX)"
    if (why := missing()) is not None:
        return why
    if _built() is None:
        return "they cannot be built, as told above"
    return "this PyTorch multiplies no blocks of bfloat16 on this processor; see ONEDNN_MAX_CPU_ISA, if that is set"


def _multiplies_bfloat16() -> bool:
    return bool(torch.cpu.get_capabilities().get("avx512_bf16", False))


def address(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    """Return the address of a contiguous tensor's first number; null for None. The tensor lives as long."""
    assert tensor is None or (tensor.is_contiguous() and tensor.is_cpu)
    pointer = ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
    pointer.tensor = tensor  # type: ignore[attr-defined]
    return pointer

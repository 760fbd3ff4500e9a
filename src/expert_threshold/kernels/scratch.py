"""Memory that operators allocate and free before they return; each declares its own, since nothing else sees it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .planned import on_cpu

FLOAT32 = 4  # bytes
_DECLARED: dict[str, Callable[..., int]] = {}


def scratch(*operators: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register a function that maps the operators' arguments to the most bytes they hold at once."""

    def declare(bytes_of: Callable[..., int]) -> Callable[..., int]:
        _DECLARED.update(dict.fromkeys(operators, bytes_of))
        return bytes_of

    return declare


def scratch_bytes(operator: str, *args: Any, **kwargs: Any) -> int:
    """Return the bytes that a call holds beside its arguments and results; 0 where the operator declares nothing."""
    return _DECLARED[operator](*args, **kwargs) if operator in _DECLARED else 0


def emulates_bfloat16() -> bool:
    """Return True if oneDNN computes this CPU's bfloat16 products in float32: it uses AVX-512, but not for bfloat16."""
    has = torch.cpu.get_capabilities()
    held_below = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper().partition("_")[0] in ("SSE41", "AVX", "AVX2")
    return bool(has.get("avx512_f", False) and not has.get("avx512_bf16", False) and not held_below)


@scratch("aten::mm", "aten::mm.out", "aten::bmm", "aten::bmm.out")
def _product(left: Tensor, right: Tensor, **_: Any) -> int:
    """Return the bytes of one matrix of the product in float32, if it is computed there."""
    widened = on_cpu(left) and left.dtype == torch.bfloat16 and emulates_bfloat16()
    return left.shape[-2] * right.shape[-1] * FLOAT32 if widened else 0


@scratch("aten::addmm", "aten::addmm_", "aten::baddbmm", "aten::baddbmm_")
def _added_product(_: Tensor, left: Tensor, right: Tensor, **__: Any) -> int:
    return _product(left, right)

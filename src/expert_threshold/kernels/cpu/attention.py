"""Causal attention with rotary positions and QK norm, and RMSNorm, by `attention.cpp`.

Backward recomputes scores and probabilities; only the projection, the output and one number per query are saved. Each
half is one operation to torch's tracer.
"""

from __future__ import annotations

from ctypes import CDLL, c_int64
from typing import Any

import torch
from torch import Tensor

from ..autograd import refuse_second_derivative
from ..planned import on_cpu
from . import FEWEST_ROWS, TILE, address, available, library


def applies(x: Tensor, width: int) -> bool:
    """Return True if the kernels can compute vectors like those of x (…, width)."""
    fits = on_cpu(x) and x.dtype == torch.bfloat16 and width % TILE == 0 and x.numel() >= FEWEST_ROWS * width
    return fits and available()


def attention(projected: Tensor, cos: Tensor, sin: Tensor, kv_heads: int) -> Tensor:
    """Return softmax(q kᵀ / √head_dim) v (batch, time, heads, head_dim), causal, with q and k rotated and normed.

    projected: (batch, time, heads + 2 · kv_heads, head_dim), queries before keys before values; cos, sin: (time,
    head_dim / 2); all in bfloat16. heads must be a multiple of kv_heads.
    """
    assert projected.shape[2] % kv_heads == 0, f"{projected.shape[2]} rows do not share {kv_heads} keys and values"
    cos, sin = cos.to(projected.dtype), sin.to(projected.dtype)
    y: Tensor = _Attention.apply(projected, cos, sin, kv_heads)
    return y


def norm(x: Tensor) -> Tensor:
    """Return x / rms(x) over the last dimension; only x is saved for backward."""
    y: Tensor = _Norm.apply(x)
    return y


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projected: Tensor, cos: Tensor, sin: Tensor, kv_heads: int) -> Tensor:
        y: Tensor
        y, normaliser = _forward(projected, cos, sin, kv_heads)
        ctx.save_for_backward(projected, cos, sin, y, normaliser)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        return _backward(dy, *ctx.saved_tensors), None, None, None


def _prepare(projected: Tensor, cos: Tensor, sin: Tensor, kv_heads: int) -> tuple[CDLL, list[Tensor], list[c_int64]]:
    """Return the kernels and the arguments shared by both halves; sizes: batch, time, heads, kv_heads, head_dim."""
    kernels = library()
    assert kernels is not None
    batch, time, rows, head_dim = projected.shape
    sizes = [c_int64(n) for n in (batch, time, rows - 2 * kv_heads, kv_heads, head_dim)]
    return kernels, [t.contiguous() for t in (projected, cos, sin)], sizes


def _results(projected: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    batch, time, rows, head_dim = projected.shape
    heads = rows - 2 * kv_heads
    return projected.new_empty(batch, time, heads, head_dim), projected.new_empty(
        batch, heads, time, dtype=torch.float32
    )


@torch.library.custom_op("expert_threshold::attention_forward", mutates_args=())
def _forward(projected: Tensor, cos: Tensor, sin: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Return y and the logarithm of each query's softmax denominator, (batch, heads, time) float32."""
    kernels, given, sizes = _prepare(projected, cos, sin, kv_heads)
    results = _results(projected, kv_heads)
    kernels.et_attention(*map(address, given), *sizes, *map(address, results))
    return results


@_forward.register_fake
def _(projected: Tensor, cos: Tensor, sin: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    return _results(projected, kv_heads)


@torch.library.custom_op("expert_threshold::attention_backward", mutates_args=())
def _backward(dy: Tensor, projected: Tensor, cos: Tensor, sin: Tensor, y: Tensor, normaliser: Tensor) -> Tensor:
    """Return the gradient of the projection."""
    kernels, given, sizes = _prepare(projected, cos, sin, (projected.shape[2] - y.shape[2]) // 2)
    dy, result = dy.contiguous(), projected.new_empty(projected.shape)
    kernels.et_attention_backward(*map(address, (dy, *given, y, normaliser)), *sizes, address(result))
    return result


@_backward.register_fake
def _(dy: Tensor, projected: Tensor, cos: Tensor, sin: Tensor, y: Tensor, normaliser: Tensor) -> Tensor:
    return projected.new_empty(projected.shape)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        y: Tensor = _norm(x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        refuse_second_derivative()
        dx: Tensor = _norm_backward(dy, *ctx.saved_tensors)
        return dx


def _by_rows(kernel: str, *inputs: Tensor) -> Tensor:
    given = [t.contiguous() for t in inputs]  # kept alive until the kernel returns
    result = given[0].new_empty(given[0].shape)
    width = result.shape[-1]
    sizes = map(c_int64, (result.numel() // width, width))
    getattr(library(), kernel)(*map(address, given), *sizes, address(result))
    return result


@torch.library.custom_op("expert_threshold::norm", mutates_args=())
def _norm(x: Tensor) -> Tensor:
    return _by_rows("et_norm", x)


@torch.library.custom_op("expert_threshold::norm_backward", mutates_args=())
def _norm_backward(dy: Tensor, x: Tensor) -> Tensor:
    return _by_rows("et_norm_backward", dy, x)


@_norm.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@_norm_backward.register_fake
def _(dy: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)

"""Causal attention with rotary positions and QK norm, and RMSNorm, by `attention.cpp`.

Backward recomputes scores and probabilities; only the projection, the output and one number per query are saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..autograd import refuse_second_derivative
from ..operator import operator
from . import FEWEST_ROWS, TILE, available


def applies(x: Tensor, width: int) -> bool:
    """Return True if the kernels can compute vectors like those of x (…, width)."""
    fits = x.is_cpu and x.dtype == torch.bfloat16 and width % TILE == 0 and x.numel() >= FEWEST_ROWS * width
    return fits and available()


def attention(
    projected: Tensor, cos: Tensor, sin: Tensor, kv_heads: int, window: int | None = None, key_offset: bool = False
) -> Tensor:
    """Return softmax(q kᵀ / √head_dim) v (batch, time, heads, head_dim), causal, with q and k rotated and normed.

    projected: (batch, time, heads + 2 · kv_heads, head_dim), queries before keys before values; cos, sin: (time,
    head_dim / 2); all in bfloat16. heads must be a multiple of kv_heads. window: the number of keys before its own that
    a query attends to; None for all. key_offset: the slow half of each rotated key is the previous token's.
    """
    assert projected.shape[2] % kv_heads == 0, f"{projected.shape[2]} rows do not share {kv_heads} keys and values"
    cos, sin = cos.to(projected.dtype), sin.to(projected.dtype)
    window = projected.shape[1] if window is None else window
    y: Tensor = _Attention.apply(projected, cos, sin, kv_heads, window, key_offset)
    return y


def norm(x: Tensor) -> Tensor:
    """Return x / rms(x) over the last dimension; only x is saved for backward."""
    y: Tensor = _Norm.apply(x)
    return y


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, cos: Tensor, sin: Tensor, kv_heads: int, window: int, key_offset: bool
    ) -> Tensor:
        y: Tensor
        y, normaliser = attention_forward(projected, cos, sin, kv_heads, window, key_offset)
        ctx.window, ctx.key_offset = window, key_offset
        ctx.save_for_backward(projected, cos, sin, y, normaliser)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        projected, cos, sin, y, normaliser = ctx.saved_tensors
        dx = attention_backward(dy, projected, cos, sin, y, normaliser, ctx.window, ctx.key_offset)
        return dx, None, None, None, None, None


@operator()
def attention_forward(
    projected: Tensor, cos: Tensor, sin: Tensor, kv_heads: int, window: int, key_offset: bool
) -> tuple[Tensor, Tensor]:
    """Return y and the logarithm of each query's softmax denominator, (batch, heads, time) float32."""
    batch, time, rows, head_dim = projected.shape
    heads = rows - 2 * kv_heads
    y = projected.new_empty(batch, time, heads, head_dim)
    return y, projected.new_empty(batch, heads, time, dtype=torch.float32)


@operator()
def attention_backward(
    dy: Tensor,
    projected: Tensor,
    cos: Tensor,
    sin: Tensor,
    y: Tensor,
    normaliser: Tensor,
    window: int,
    key_offset: bool,
) -> Tensor:
    """Return the gradient of the projection."""
    return projected.new_empty(projected.shape)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        y: Tensor = norm_forward(x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        refuse_second_derivative()
        dx: Tensor = norm_backward(dy, *ctx.saved_tensors)
        return dx


@operator()
def norm_forward(x: Tensor) -> Tensor:
    """Return x / rms(x)."""
    return x.new_empty(x.shape)


@operator()
def norm_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x."""
    return x.new_empty(x.shape)

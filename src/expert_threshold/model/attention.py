"""Causal self-attention with rotary positions and QK norm, with or without a key-value cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..moe import Linear


class Cache:
    """Keys and values of the tokens seen so far, one pair per layer, (batch, kv_heads, capacity, head_dim).

    `length` counts the tokens held; `GPT` advances it.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (layers, batch, kv_heads, capacity, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.length = 0

    @property
    def capacity(self) -> int:
        """Tokens there is room for."""
        return self.keys.shape[3]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write (batch, kv_heads, time, head_dim) behind what `layer` holds; return all of it."""
        end = self.length + keys.shape[2]
        self.keys[layer, :, :, self.length : end] = keys
        self.values[layer, :, :, self.length : end] = values
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


def rotary(positions: Tensor, head_dim: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines, (time, head_dim / 2) float32, of positions (time,)."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angles = positions[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of x (batch, heads, time, head_dim) against each other by the positions' angles (RoPE)."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)


def norm(x: Tensor) -> Tensor:
    """RMSNorm without parameters over the last dimension."""
    return F.rms_norm(x, (x.shape[-1],))


class Attention(nn.Module):
    """Multi-head attention; kv_heads < heads is grouped-query attention."""

    def __init__(self, d_model: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = d_model // heads
        self.query = Linear(d_model, heads * self.head_dim)
        self.key = Linear(d_model, kv_heads * self.head_dim)
        self.value = Linear(d_model, kv_heads * self.head_dim)
        self.output = Linear(heads * self.head_dim, d_model)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None, layer: int) -> Tensor:
        """x: (batch, time, d_model), the tokens behind those in the cache; cos, sin: their rotary table."""
        q, k, v = (self._heads(project(x)) for project in (self.query, self.key, self.value))
        q, k = norm(rotate(q, cos, sin)), norm(rotate(k, cos, sin))
        if cache is not None:
            k, v = cache.append(layer, k, v)
        time, seen = q.shape[2], k.shape[2]
        mask = None
        if 1 < time < seen:
            mask = torch.ones(time, seen, dtype=torch.bool, device=x.device).tril(seen - time)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=1 < time == seen, enable_gqa=q.shape[1] != k.shape[1]
        )
        output: Tensor = self.output(y.transpose(1, 2).flatten(2))
        return output

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)

"""Causal self-attention with rotary positions and QK norm, with or without a key-value cache."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..kernels import apply, refuse_second_derivative
from ..kernels.cpu.blocks import override
from ..moe import Linear, RoutingHistory, plain
from .presets import VALUE_GATE_CHANNELS


class Cache:
    """The past of sequences, one per row: the keys and values of every layer, and what routing needs.

    Each row has its own length. A forward appends its i-th sequence to the i-th selected row, and `GPT` advances the
    lengths. Initially, all rows are selected.

    held: zeros (layers, rows, capacity + 1, 2, kv_heads, head_dim). Kernels read and write it in this layout, which has
    one position more than the capacity: with key offset, a token writes the slow half of its key to the next position.
    last: (rows, d_model), the last embedding of each row, or (rows, 0) for a model without smear.
    """

    def __init__(self, held: Tensor, last: Tensor) -> None:
        self.held, self.last = held, last
        self.lengths = [0] * len(last)
        self.rows: Sequence[int] = range(len(last))
        self._pasts: list[dict[int, RoutingHistory]] = [{} for _ in self.rows]  # by layer

    @property
    def capacity(self) -> int:
        """The maximum number of tokens in a row."""
        return self.held.shape[2] - 1

    def select(self, rows: Sequence[int]) -> Cache:
        """Return this cache with other rows selected. Appending to either cache appends to both.

        Raises ValueError if a row is given twice or does not exist.
        """
        if len(set(rows)) < len(rows) or not all(0 <= row < len(self.lengths) for row in rows):
            raise ValueError(f"rows {list(rows)} must be distinct and between 0 and {len(self.lengths) - 1}")
        selected = copy(self)
        selected.rows = rows
        return selected

    def begin(self, row: int, pasts: Mapping[int, RoutingHistory]) -> None:
        """Start an empty sequence in a row. pasts: the `Router.past` of each MoE layer, keyed by layer."""
        self.lengths[row] = 0
        self.last[row] = 0
        self._pasts[row] = dict(pasts)

    def copies(self, rows: Sequence[int], capacity: int) -> Cache:
        """Return a cache with the given capacity whose i-th row contains a copy of the sequence in rows[i]."""
        chosen = torch.tensor(rows, dtype=torch.int64, device=self.held.device)
        layers, _, _, *shape = self.held.shape
        other = Cache(self.held.new_zeros(layers, len(rows), capacity + 1, *shape), self.last[chosen])
        other.lengths = [self.lengths[row] for row in rows]
        written = max(other.lengths, default=0) + 1
        other.held[:, :, :written] = self.held[:, chosen, :written]
        other._pasts = [dict(self._pasts[row]) for row in rows]
        return other

    def pasts(self, layer: int) -> list[RoutingHistory]:
        """Return the histories from which a layer routes the next tokens of the selected rows."""
        pasts = [(row, self._pasts[row].get(layer, RoutingHistory())) for row in self.rows]
        # A failed forward may have appended the scores of tokens that were never counted.
        return [p if p.scores is None else p._replace(scores=p.scores[: self.lengths[row]]) for row, p in pasts]

    def append_scores(self, layer: int, scores: Tensor) -> None:
        """Append router scores (rows, time, num_scores) to the histories of the selected rows."""
        for row, past, new in zip(self.rows, self.pasts(layer), scores, strict=True):
            so_far = new if past.scores is None else torch.cat((past.scores, new))
            self._pasts[row][layer] = past._replace(scores=so_far)

    def advance(self, time: int) -> None:
        """Increase the lengths of the selected rows by `time` tokens."""
        for row in self.rows:
            self.lengths[row] += time


class CacheSlice:
    """The part of a cache where one forward appends `time` tokens to each selected row.

    positions: (rows, time), the positions in the sequences; end: the length of the longest sequence afterwards.
    """

    def __init__(self, cache: Cache, time: int) -> None:
        starts = [cache.lengths[row] for row in cache.rows]
        device = cache.held.device
        rows, begun = torch.tensor([cache.rows, starts], dtype=torch.int64, device=device)
        self.cache = cache
        self.end = max(starts, default=0) + time
        self.positions = begun[:, None] + torch.arange(time, device=device)
        self._chosen = rows
        self._masks: dict[int | None, Tensor] = {}  # by window
        self._alike = len(set(starts)) < 2
        self._is_causal = self._alike and not 1 < time < self.end  # or each row has a single query
        self._places = (rows[:, None] * cache.held.shape[2] + self.positions).flatten()
        first, last = min(cache.rows, default=0), max(cache.rows, default=-1)
        neighbours = list(cache.rows) == list(range(first, last + 1))
        self._rows: slice | Tensor = slice(first, last + 1) if neighbours else rows  # a slice is not copied

    def mask(self, window: int | None) -> Tensor | None:
        """Return the mask to add to attention scores (…, time, end), or None if every token attends to all keys up to
        its own. window: the number of earlier tokens that a token attends to, or None for all.
        """
        reaches_all = window is None or self.end <= window + 1
        if self._is_causal and reaches_all:
            return None
        if window not in self._masks:
            positions = self.positions[: 1 if self._alike else None, None, :, None]
            keys = torch.arange(self.end, device=positions.device)
            self._masks[window] = _mask(positions, keys, window, self.cache.held.dtype)
        return self._masks[window]

    def last(self) -> Tensor:
        """Return the embedding of each row's last token, (rows, d_model), or zeros for an empty row."""
        return self.cache.last[self._chosen]

    def keep_last(self, embedded: Tensor) -> None:
        """Store the last embedding of each row in (rows, time, d_model) for the next forward to read as `last`."""
        if embedded.shape[1]:
            self.cache.last[self._chosen] = embedded[:, -1]

    def append(self, layer: int, keys: Tensor, values: Tensor, key_offset: bool = False) -> tuple[Tensor, Tensor]:
        """Append (rows, kv_heads, time, head_dim) to the cache of `layer` and return the first `end` of each row.

        key_offset: return keys as `delay` does.
        """
        held = self.cache.held[layer]
        new = torch.stack((keys.transpose(1, 2), values.transpose(1, 2)), 2).flatten(0, 1)
        places = held.view(-1, *held.shape[2:])
        if key_offset:
            for half, (into, these) in enumerate(zip(halves(places[:, 0]), halves(new[:, 0]), strict=True)):
                into.index_copy_(0, self._places + half, these)
            places[:, 1].index_copy_(0, self._places, new[:, 1])
        else:
            places.index_copy_(0, self._places, new)
        k, v = held[self._rows, : self.end].permute(2, 0, 3, 1, 4)
        return k, v


def _mask(queries: Tensor, keys: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return the mask to add to attention scores: −∞ if a key is after the query or outside its window, otherwise 0."""
    hidden = keys > queries
    if window is not None:
        hidden |= keys < queries - window
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -math.inf)


def rotary(positions: Tensor, head_dim: int, base: float = 10_000.0, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, (…, time, head_dim / 2) float32, for positions (…, time), multiplied by `scale`."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angles = positions[..., None] * frequencies
    return angles.cos() * scale, angles.sin() * scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of x (…, time, head_dim) by the angles of the positions (RoPE), outside autograd."""
    y = x.new_empty(x.shape)
    (a, b), (out_a, out_b) = x.chunk(2, -1), y.chunk(2, -1)
    torch.mul(a, cos, out=out_a).addcmul_(b, sin)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin, value=-1)
    return y


def _inverse_rms(x: Tensor) -> Tensor:
    """Return 1 / √(mean x² + ε) in float32, with the mean over the last dimension, which is kept."""
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    mean_squares: Tensor = norms.square_().div_(x.shape[-1])
    return mean_squares.add_(torch.finfo(torch.float32).eps).rsqrt_()


class _Norm(torch.autograd.Function):
    """x / rms(x), rotated by cos and sin if given. Only the input and one number per row are saved for backward.

    Rotation preserves length, so the norm can come last. The rotary table may include a scale.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *table: Tensor) -> Tensor:
        scale = _inverse_rms(x)
        ctx.save_for_backward(x, scale, *table)
        return rotate(x, *table).mul_(scale) if table else torch.mul(x, scale, out=torch.empty_like(x))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        x, scale, *table = ctx.saved_tensors
        dy = rotate(dy, table[0], -table[1]) if table else dy.clone()
        # For y = x · scale, the gradient is scale · (dy − y · mean(dy · y)).
        along = (dy * x).sum(-1, keepdim=True, dtype=torch.float32) / x.shape[-1]
        dx = dy.addcmul_(x, (along * scale.square()).to(x.dtype), value=-1).mul_(scale)
        return dx, *(None for _ in table)


def norm(x: Tensor) -> Tensor:
    """Apply RMSNorm without parameters over the last dimension."""
    if torch.compiler.is_compiling():  # the compiler fuses plain operations
        wide = x.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).rsqrt()).to(x.dtype)
    kernel = override("norm", x)
    y: Tensor = apply(_Norm, x) if kernel is None else kernel(x)
    return y


def rotary_norm(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the norm, rotary positions and their scale to x (batch, heads, time, head_dim)."""
    if torch.compiler.is_compiling():
        a, b = norm(x).chunk(2, -1)
        return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)
    y: Tensor = apply(_Norm, x, cos, sin)
    return y


def halves(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return two views of keys (…, head_dim), both (…, 2, pairs): the fast-rotating channels, and the ⌊head_dim / 4⌋
    pairs of channels that rotate slowest.
    """
    pairs = keys.shape[-1] // 2
    fast, slow = keys.unflatten(-1, (2, pairs)).split((pairs - pairs // 2, pairs // 2), -1)
    return fast, slow


def delay(keys: Tensor) -> Tensor:
    """Replace the slow half of rotated keys (…, time, head_dim) with the previous token's, or zeros at the start.

    A query can then find a token by what preceded it, within one layer ("partial key offset", pull request 169 of
    modded-nanogpt).
    """
    fast, slow = halves(keys)
    return torch.cat((fast, F.pad(slow[..., :-1, :, :], (0, 0, 0, 0, 1, 0))), -1).flatten(-2)


ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Kernels that support a growing cache. cuDNN, torch's first choice on Hopper, would make a plan for every length."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, window: int | None = None, *, grows: bool = False
) -> Tensor:
    """Return the output of attention (batch, heads, time, head_dim). k and v may have fewer heads. Without a mask,
    attention is causal: each query attends to `window` keys before its own, or to all if None. A single query attends
    to every key. grows: whether the number of keys changes with every call.
    """
    causal = mask is None and q.shape[2] > 1
    if causal and window is not None and window + 1 < q.shape[2]:
        if has_flash(q):
            return _within_window(q, k, v, window)
        positions = torch.arange(q.shape[2], device=q.device)
        mask, causal = _mask(positions[:, None], positions, window, q.dtype), False
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel(ANY_LENGTH) if grows and q.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)


def has_flash(q: Tensor) -> bool:
    """Return True if PyTorch's flash attention supports queries (…, head_dim) on this device."""
    narrow = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return q.is_cuda and narrow and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _within_window(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Return causal attention in which each query attends to `window` keys before its own. Other keys cost nothing."""
    from torch.nn.attention.varlen import varlen_attn

    batch, heads, time, _ = q.shape
    k, v = (t.repeat_interleave(heads // t.shape[1], 1) if t.shape[1] != heads else t for t in (k, v))
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    begins = torch.arange(0, (batch + 1) * time, time, dtype=torch.int32, device=q.device)
    y = varlen_attn(q, k, v, begins, begins, time, time, window_size=(window, 0))
    assert isinstance(y, Tensor)  # not a tuple, since nothing else was requested
    return y.view(batch, time, heads, -1).transpose(1, 2)


class _AddToLast(torch.autograd.Function):
    """Adds y (…, m) to the last m channels of x (…, n) in place, since autograd's own derivative would copy x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.channels = y.shape[-1]
        x[..., -y.shape[-1] :] += y
        return x

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor]:
        return dx, dx[..., -ctx.channels :]


class Attention(nn.Module):
    """Multi-head attention, or grouped-query attention if kv_heads < heads.

    window: the number of earlier tokens that a token attends to, or None for all. vocab_size: the number of value
    embeddings, or None for no value embeddings. key_offset: take half of each key from the previous token, see `delay`.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        kv_heads: int,
        window: int | None = None,
        vocab_size: int | None = None,
        *,
        key_offset: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim = d_model // heads
        self.kv_heads = kv_heads
        self.window = window
        self.key_offset = key_offset
        self.query = Linear(d_model, heads * self.head_dim)
        self.key = Linear(d_model, kv_heads * self.head_dim)
        self.value = Linear(d_model, kv_heads * self.head_dim)
        self.output = Linear(heads * self.head_dim, d_model)
        self.value_embed: nn.Embedding | None = None
        self.value_gate: Linear | None = None
        if vocab_size is not None:
            self.value_embed = nn.Embedding.from_pretrained(torch.empty(vocab_size, kv_heads * self.head_dim), False)
            self.value_gate = Linear(min(VALUE_GATE_CHANNELS, d_model), kv_heads)
        self._joined: Tensor | None = None

    def joined(self, *, keep: bool = False) -> Tensor:
        """Return the weights of queries, keys and values as one matrix. keep: the weights no longer change, so that
        later calls can return the same matrix, without gradients.
        """
        if self._joined is not None:
            return self._joined
        weights = torch.cat([projection.weight for projection in (self.query, self.key, self.value)])
        if keep:
            self._joined = weights.detach()
        return weights

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, span: CacheSlice | None, layer: int, tokens: Tensor | None = None
    ) -> Tensor:
        """Return the attention of x (batch, time, d_model). If `span` is given, append keys and values to the cache.
        cos, sin: the rotary table of x; tokens: (batch, time) int64, which value embeddings require.
        """
        projections = self.query, self.key, self.value
        if plain(*projections):
            projected = F.linear(x, self.joined().to(x.dtype))
        else:
            projected = torch.cat([projection(x) for projection in projections], -1)
        kv_heads = self.kv_heads
        if self.value_embed is not None:
            assert tokens is not None
            projected = _AddToLast.apply(projected, self._value_embeddings(x, tokens).flatten(2))
        projected = projected.unflatten(-1, (-1, self.head_dim))
        output: Tensor
        # The kernel supports only these arguments. A new option of attention must be passed to it or prevent its use.
        if span is None and (kernel := override("attention", projected)) is not None:
            output = self.output(kernel(projected, cos, sin, kv_heads, self.window, self.key_offset).flatten(2))
            return output
        heads = projected.transpose(1, 2)
        straight, v = heads.split((heads.shape[1] - kv_heads, kv_heads), 1)
        q, k = rotary_norm(straight, cos, sin).split((straight.shape[1] - kv_heads, kv_heads), 1)
        if span is not None:
            k, v = span.append(layer, k, v, self.key_offset)
        elif self.key_offset:
            k = delay(k)
        mask = None if span is None else span.mask(self.window)
        output = self.output(attend(q, k, v, mask, self.window, grows=span is not None).transpose(1, 2).flatten(2))
        return output

    def _value_embeddings(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return the gated value embeddings, 3 σ(gate · x) table[token], (batch, time, kv_heads, head_dim)."""
        assert self.value_embed is not None
        assert self.value_gate is not None
        gates = 3 * self.value_gate(x[..., :VALUE_GATE_CHANNELS]).sigmoid()
        embedded: Tensor = self.value_embed(tokens).to(x.dtype)
        added: Tensor = gates[..., None] * embedded.unflatten(-1, (-1, self.head_dim))
        return added

"""Rotary positions, the norm, and attention against its definition."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from expert_threshold.model.attention import (
    QUERIES_PER_BLOCK,
    Attention,
    Cache,
    Span,
    attend,
    norm,
    rotary,
    rotary_norm,
    rotate,
)
from rounding import assert_rounded


def at(position: int, x: Tensor) -> Tensor:
    """x (head_dim,) rotated to a position."""
    cos, sin = rotary(torch.tensor([float(position)]), len(x))
    return rotate(x[None, None, None], cos, sin)[0, 0, 0]


@given(position=st.integers(0, 500), distance=st.integers(0, 500), shift=st.integers(0, 1000))
def test_scores_depend_on_the_distance_of_positions_alone(position: int, distance: int, shift: int) -> None:
    query, key = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    here = at(position + distance, query) @ at(position, key)
    there = at(position + distance + shift, query) @ at(position + shift, key)
    torch.testing.assert_close(here, there, atol=5e-3, rtol=0)


def test_scores_do_depend_on_the_distance() -> None:
    query, key = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    scores = torch.stack([at(distance, query) @ at(0, key) for distance in range(8)])
    assert scores.unique().numel() == 8


def test_a_rotation_turns_each_pair_by_position_times_its_frequency_and_keeps_lengths() -> None:
    cos, sin = rotary(torch.arange(5.0), 4, base=100.0)
    angles = torch.tensor([[p * 1.0, p * 0.1] for p in range(5)])
    torch.testing.assert_close(cos, angles.cos())
    torch.testing.assert_close(sin, angles.sin())
    x = torch.randn(2, 3, 5, 4)
    turned = rotate(x, cos, sin)
    assert torch.equal(turned[..., 0, :], x[..., 0, :])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    pair = torch.complex(x[..., 0], x[..., 2]) * torch.polar(torch.ones(5), -angles[:, 0])
    torch.testing.assert_close(torch.complex(turned[..., 0], turned[..., 2]), pair)


def test_the_norm_divides_by_the_root_mean_square() -> None:
    x = torch.randn(3, 5, 8) * 7
    torch.testing.assert_close(norm(x), x / (x**2).mean(-1, keepdim=True).sqrt())
    assert torch.equal(norm(torch.zeros(2, 8)), torch.zeros(2, 8))


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The output, and what a fixed gradient of it becomes at each input."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    return [y, *torch.autograd.grad(y, leaves, torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape))]


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=torch.finfo(torch.float32).eps)


def test_norms_and_their_gradients_are_those_of_plain_expressions() -> None:
    torch.manual_seed(0)
    cos, sin = rotary(torch.arange(5.0), 8)
    x = torch.randn(2, 5, 3, 8).transpose(1, 2)

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return rms_norm(torch.cat((a * cos + b * sin, b * cos - a * sin), -1))

    torch.testing.assert_close(gradients(norm, x), gradients(rms_norm, x))
    torch.testing.assert_close(gradients(lambda x: rotary_norm(x, cos, sin), x), gradients(turned, x))


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("time", [2, QUERIES_PER_BLOCK, 2 * QUERIES_PER_BLOCK + 3])
def test_attention_and_its_gradients_are_those_of_torch_in_one_block_and_in_many(time: int, kv_heads: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, time, 8), *torch.randn(2, 2, kv_heads, time, 8)

    def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    torch.testing.assert_close(gradients(attend, q, k, v), gradients(by_torch, q, k, v), atol=1e-5, rtol=1e-4)


def test_attention_in_bfloat16_is_that_of_float32_rounded() -> None:
    torch.manual_seed(0)
    inputs = (torch.nn.functional.normalize(torch.randn(3, 2, 4, 300, 64), dim=-1) * 8).bfloat16()
    exact = gradients(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), *inputs.float())
    for found, wanted in zip(gradients(attend, *inputs), exact, strict=True):
        assert_rounded(found, wanted, 2)


def by_definition(attention: Attention, x: Tensor) -> Tensor:
    """softmax(q kᵀ / √head_dim) v with later keys hidden, one head and one token at a time."""
    batch, time, _ = x.shape
    width = attention.head_dim
    cos, sin = rotary(torch.arange(float(time)), width)
    queries, keys, values = (
        layer(x).view(batch, time, -1, width).transpose(1, 2)
        for layer in (attention.query, attention.key, attention.value)
    )
    queries, keys = norm(rotate(queries, cos, sin)), norm(rotate(keys, cos, sin))
    shared = queries.shape[1] // keys.shape[1]
    y = torch.zeros(batch, time, queries.shape[1] * width)
    for b in range(batch):
        for h in range(queries.shape[1]):
            for t in range(time):
                scores = keys[b, h // shared, : t + 1] @ queries[b, h, t] / width**0.5
                y[b, t, h * width : (h + 1) * width] = scores.softmax(0) @ values[b, h // shared, : t + 1]
    return attention.output(y)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("time", [1, 2, 7])
@torch.no_grad()
def test_attention_is_its_definition_with_any_number_of_key_value_heads(time: int, kv_heads: int) -> None:
    torch.manual_seed(0)
    attention = Attention(16, 4, kv_heads)
    x = torch.randn(2, time, 16)
    cos, sin = rotary(torch.arange(float(time)), 4)
    torch.testing.assert_close(attention(x, cos, sin, None, 0), by_definition(attention, x))


def test_a_cache_hands_back_what_it_was_given_layer_by_layer() -> None:
    cache = Cache(2, 3, 2, 6, 4, torch.float32, torch.device("cpu"))
    assert cache.capacity == 6
    keys, values = torch.randn(2, 3, 2, 6, 4), torch.randn(2, 3, 2, 6, 4)
    for start, end in ((0, 2), (2, 3), (3, 6)):
        span = Span(cache, end - start)
        assert span.end == end
        for layer in (0, 1):
            k, v = span.append(layer, keys[layer, :, :, start:end], values[layer, :, :, start:end])
            assert torch.equal(k, keys[layer, :, :, :end])
            assert torch.equal(v, values[layer, :, :, :end])
        cache.advance(end - start)


@pytest.mark.parametrize("rows", [[1], [0, 1], [3, 0], [0, 2, 3], []])
def test_appending_to_selected_rows_changes_only_their_ends(rows: list[int]) -> None:
    cache = Cache(1, 4, 2, 9, 4, torch.float32, torch.device("cpu"))
    cache.held.normal_()
    cache.lengths = [5, 2, 0, 6]
    before, selected = cache.held.clone(), cache.select(rows)
    keys, values = torch.randn(2, len(rows), 2, 3, 4)
    span = Span(selected, 3)
    k, v = span.append(0, keys, values)
    selected.advance(3)
    assert cache.lengths == [n + 3 if row in rows else n for row, n in enumerate([5, 2, 0, 6])]
    for i, row in enumerate(rows):
        start, end = cache.lengths[row] - 3, cache.lengths[row]
        assert torch.equal(span.positions[i], torch.arange(start, end))
        expected = before[0, row].clone()
        expected[start:end] = torch.stack((keys[i].transpose(0, 1), values[i].transpose(0, 1)), 1)
        assert torch.equal(cache.held[0, row], expected)
        assert torch.equal(k[i].transpose(0, 1), expected[: span.end, 0])
        assert torch.equal(v[i].transpose(0, 1), expected[: span.end, 1])
    others = [row for row in range(4) if row not in rows]
    assert torch.equal(cache.held[:, others], before[:, others])

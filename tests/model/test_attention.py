"""Rotary positions, the norm, and attention against its definition."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from created import created_by, fake_gpu
from expert_threshold.model.attention import (
    Attention,
    attend,
    norm,
    rotary,
    rotary_norm,
    rotate,
)
from rounding import assert_rounded


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
    assert torch.equal(norm(torch.zeros(2, 8)), torch.zeros(2, 8))
    torch.testing.assert_close(gradients(lambda x: rotary_norm(x, cos, sin), x), gradients(turned, x))


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


def test_on_a_gpu_no_key_beyond_the_window_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense mask made every query meet every key."""
    time, width = 512, 32
    with fake_gpu(monkeypatch):
        q, k = (torch.empty(2, heads, time, width, dtype=torch.bfloat16, device="cuda") for heads in (4, 2))
        made = created_by(lambda: attend(q, k, k, window=100))
        assert attend(q, k, k, window=100).shape == q.shape
    assert max(size for _, size in made) == q.numel() < time * time


def test_on_a_gpu_a_cache_of_any_length_is_attended_to_without_a_plan_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuDNN, torch's first choice on Hopper, plans for every new length, which took longer than all else."""
    allowed = []

    def attending(q: Tensor, *_: object, **__: object) -> Tensor:
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", attending)
    with fake_gpu(monkeypatch):
        q = torch.empty(2, 4, 1, 8, dtype=torch.bfloat16, device="cuda")
        attend(q, q, q)
        attend(q, q, q, grows=True)
    assert allowed == [True, False]

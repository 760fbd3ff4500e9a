"""Rotary positions, the norm, and attention against its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from created import created_by, fake_gpu
from expert_threshold.model.attention import Attention, attend, norm, rotary, rotary_norm, rotate
from rounding import with_gradients


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


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=torch.finfo(torch.float32).eps)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)


def test_norms_and_their_gradients_are_those_of_plain_expressions() -> None:
    torch.manual_seed(0)
    cos, sin = rotary(torch.arange(5.0), 8)
    x = torch.randn(2, 5, 3, 8).transpose(1, 2)

    torch.testing.assert_close(with_gradients(norm, x), with_gradients(rms_norm, x))
    assert torch.equal(norm(torch.zeros(2, 8)), torch.zeros(2, 8))
    found = with_gradients(lambda x: rotary_norm(x, cos, sin), x)
    torch.testing.assert_close(found, with_gradients(lambda x: rms_norm(turned(x, cos, sin)), x))


def by_definition(attention: Attention, x: Tensor, cos: Tensor, sin: Tensor, tokens: Tensor) -> Tensor:
    """softmax(q kᵀ / √head_dim) v over the keys in the window, one token at a time."""
    width = attention.head_dim
    queries, keys, values = (
        F.linear(x, layer.weight).unflatten(-1, (-1, width)).transpose(1, 2)
        for layer in (attention.query, attention.key, attention.value)
    )
    if attention.value_embed is not None:
        gates = 3 * F.linear(x[..., :12], attention.value_gate.weight).sigmoid()
        embedded = attention.value_embed.weight[tokens].unflatten(-1, (-1, width))
        values = values + (gates[..., None] * embedded).transpose(1, 2)
    queries, keys = (rms_norm(turned(heads, cos, sin)) for heads in (queries, keys))
    if attention.key_offset:  # the second half of each half, which rotates by small angles
        previous = F.pad(keys[:, :, :-1], (0, 0, 1, 0))
        slow = torch.arange(width) % (width // 2) >= width // 4
        keys = torch.where(slow, previous, keys)
    rows = []
    for t in range(x.shape[1]):
        first = 0 if attention.window is None else max(0, t - attention.window)
        seen_keys, seen_values = (
            each[:, :, first : t + 1].repeat_interleave(queries.shape[1] // keys.shape[1], 1) for each in (keys, values)
        )
        shares = (seen_keys @ queries[:, :, t, :, None] / width**0.5).softmax(2)
        rows.append((shares * seen_values).sum(2).flatten(1))
    return F.linear(torch.stack(rows, 1), attention.output.weight)


OPTIONS: dict[str, dict[str, Any]] = {
    "paper": {}, "window": {"window": 2}, "key offset": {"key_offset": True}, "value embeddings": {"vocab_size": 9},
    "all": {"window": 2, "key_offset": True, "vocab_size": 9},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("time", [1, 2, 7])
def test_attention_and_its_gradients_equal_the_definition(time: int, kv_heads: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    attention = Attention(32, 4, kv_heads, **options)
    if attention.value_embed is not None:
        torch.nn.init.normal_(attention.value_embed.weight)
    x, tokens, table = torch.randn(2, time, 32), torch.randint(9, (2, time)), rotary(torch.arange(float(time)), 8)
    weights = list(attention.parameters())
    x.requires_grad_()
    expected, y = by_definition(attention, x, *table, tokens), attention(x, *table, None, 0, tokens)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    gradients = (torch.autograd.grad(each, [x, *weights], dy) for each in (y, expected))
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


def test_on_a_gpu_no_key_beyond_the_window_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a dense mask multiplied every query by every key."""
    time, width = 512, 32
    with fake_gpu(monkeypatch):
        q, k = (torch.empty(2, heads, time, width, dtype=torch.bfloat16, device="cuda") for heads in (4, 2))
        made = created_by(lambda: attend(q, k, k, window=100))
        assert attend(q, k, k, window=100).shape == q.shape
    assert max(size for _, size in made) == q.numel() < time * time


def test_on_a_gpu_a_cache_of_any_length_needs_no_plan_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: cuDNN, torch's first choice on Hopper, makes a slow plan for every new length."""
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

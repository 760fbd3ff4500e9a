"""The optional pieces of the trunk, each alone and all together, in training and with a cache."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cases import PIECES
from expert_threshold.model import GPT, TRUNKS, GPTConfig, flops_per_token, parameter_counts
from expert_threshold.model.attention import attend, norm

from . import test_gpt
from .test_gpt import CONTEXT, VOCAB, tokens_of

ALL = PIECES["all of them"]
pieces = pytest.mark.parametrize("piece", PIECES.values(), ids=PIECES.keys())
small = partial(test_gpt.small, None, layers=4, kv_heads=2)
lively: Any = partial(test_gpt.lively, None, layers=4, kv_heads=2)


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


# Each piece as its equation.


def test_a_trunk_names_the_same_options_and_the_papers_is_the_default() -> None:
    assert TRUNKS["nanochat"].keys() <= TRUNKS["paper"].keys()
    assert replace(GPTConfig(), **TRUNKS["paper"]) == GPTConfig()


@pieces
def test_every_piece_changes_the_logits_and_adds_to_the_papers_weights(piece: dict[str, Any]) -> None:
    paper, model = GPT(small()), GPT(small(**piece))
    assert paper.state_dict().keys() <= model.state_dict().keys()
    weights = lively(**piece).state_dict()
    model.load_state_dict(weights)
    paper.load_state_dict({name: weights[name] for name in paper.state_dict()})
    tokens = tokens_of(2, CONTEXT)
    assert difference(model(tokens).logits, paper(tokens).logits) > 1e-3


@pytest.mark.parametrize(("which", "layers"), [("alternate", [1, 3]), ("all", [0, 1, 2, 3]), (None, [])])
def test_value_embeddings_are_in_every_other_layer_the_last_included_or_in_all(which: Any, layers: list[int]) -> None:
    model = GPT(small(value_embeddings=which))
    assert [i for i, block in enumerate(model.blocks) if block.attention.value_embed is not None] == layers  # type: ignore[union-attr]


def test_smear_adds_the_previous_tokens_embedding_and_none_to_the_first() -> None:
    model = lively(smear=True)
    x = torch.randn(2, 5, 32)
    gates = model.smear_scalar * torch.sigmoid(F.linear(x[..., :24], model.smear_gate.weight))
    y = model._smeared(x, None)
    torch.testing.assert_close(y[:, 1:], x[:, 1:] + gates[:, 1:] * x[:, :-1])
    assert torch.equal(y[:, 0], x[:, 0])


def test_backout_subtracts_the_middle_layers_output_before_the_last_norm() -> None:
    model, seen = lively(backout=True), {}
    for name in ("blocks.2", "blocks.3", "head"):
        model.get_submodule(name).register_forward_hook(lambda _, x, y, name=name: seen.update({name: (x[0], y[0])}))
    model(tokens_of(2, CONTEXT))
    expected = norm(seen["blocks.3"][1] - model.backout_scalar * seen["blocks.2"][1])
    torch.testing.assert_close(seen["head"][0], expected)


def test_scalars_of_one_and_zero_are_the_papers_trunk() -> None:
    model = lively(residual_scalars=True, skip_scalars=True, smear=True, backout=True)
    with torch.no_grad():
        model.residual_scalars.fill_(1)
        for scalars in (model.skip_scalars, model.smear_scalar, model.backout_scalar):
            scalars.zero_()
    paper = GPT(small())
    paper.load_state_dict({name: model.state_dict()[name] for name in paper.state_dict()})
    tokens = tokens_of(2, CONTEXT)
    torch.testing.assert_close(model(tokens).logits, paper(tokens).logits, atol=1e-6, rtol=0)


def test_queries_and_keys_have_the_root_mean_square_of_their_scale() -> None:
    cos, sin = GPT(small(qk_scale=1.5)).rotary(torch.arange(4.0))
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, 1.5**2))


def test_scalars_start_as_in_nanochat() -> None:
    model: Any = GPT(small(**ALL))
    torch.testing.assert_close(model.residual_scalars, torch.tensor([1.15 - 0.10 * i / 3 for i in range(4)]))
    torch.testing.assert_close(model.skip_scalars, torch.tensor([0.20 - 0.15 * i / 3 for i in range(4)]))
    assert (model.smear_scalar.item(), round(model.backout_scalar.item(), 6)) == (0, 0.2)
    for weight in (model.smear_gate.weight, model.blocks[3].attention.value_gate.weight):
        assert weight.min() >= 0
        assert weight.max() <= 0.02


def test_the_last_layer_sees_all_and_short_ones_their_window() -> None:
    config = small(layers=5, windows="SSSL", short_window=7)
    assert [config.window(layer) for layer in range(5)] == [7, 7, 7, None, None]
    assert small(context=2048, windows="S").window(0) == 512
    assert small(context=300, windows="S").window(0) == 128


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("time", "window"), [(9, 3), (5, 3), (300, 100), (600, 256), (600, 1), (300, None)])
def test_a_token_attends_to_itself_and_its_window_before_it(dtype: torch.dtype, time: int, window: int | None) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, time, 8).to(dtype).requires_grad_() for heads in (4, 2, 2))
    distance = torch.arange(time)[:, None] - torch.arange(time)
    mask = (distance >= 0) & (distance <= (time if window is None else window))
    wide: Any = [t.detach().float().requires_grad_() for t in (q, k, v)]
    expected = F.scaled_dot_product_attention(wide[0], wide[1], wide[2], attn_mask=mask, enable_gqa=True)
    y = attend(q, k, v, window=window)
    dy = torch.randn(y.shape)
    tolerance: Any = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.06, "rtol": 0.06}
    torch.testing.assert_close(y.float(), expected, **tolerance)
    gradients = torch.autograd.grad(y, (q, k, v), dy.to(dtype)), torch.autograd.grad(expected, wide, dy)
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own.float(), other, **tolerance)


# Training.


@pieces
def test_bfloat16_is_float32_rounded(piece: dict[str, Any]) -> None:
    wide, narrow = lively(**piece), GPT(small(**piece), torch.bfloat16)
    narrow.load_state_dict(wide.state_dict())
    tokens = tokens_of(3, CONTEXT)
    a, b = wide(tokens).logits, narrow(tokens).logits
    assert ((a - b).square().mean() / a.square().mean()).sqrt() < 0.05


# Costs.


def test_a_table_of_value_embeddings_adds_parameters_but_no_flops() -> None:
    config = small(value_embeddings="all")
    larger = replace(config, vocab_size=100 * VOCAB)
    more = parameter_counts(larger)["value_embeddings"] - parameter_counts(config)["value_embeddings"]
    assert more == 99 * VOCAB * 16 * 4
    ends = 2 * 99 * VOCAB * 32  # embedding and head
    assert parameter_counts(larger)["active"] == parameter_counts(config)["active"] + ends
    assert flops_per_token(larger) == flops_per_token(config) + 6 * ends // 2


@pytest.mark.parametrize("window", [1, 3, 15, 99])
def test_the_flops_of_a_window_are_those_of_the_keys_in_it(window: int) -> None:
    keys = sum(min(t + 1, window + 1) for t in range(CONTEXT)) / CONTEXT
    saved = (CONTEXT + 1) / 2 - keys
    config = small(windows="SSSL", short_window=window)
    assert flops_per_token(config) == flops_per_token(small()) - round(12 * 32 * 3 * saved)


# With a cache.


def test_a_copied_cache_continues_and_a_restarted_row_has_no_past() -> None:
    model, tokens = lively(**ALL).eval(), tokens_of(2, CONTEXT)
    cache = model.new_cache(2, CONTEXT)
    with torch.no_grad():
        whole = model(tokens).logits
        model(tokens[:, :6], cache=cache)
        logits = model(tokens[[1, 0, 1], 6:], cache=cache.copies([1, 0, 1], CONTEXT)).logits
        torch.testing.assert_close(logits, whole[[1, 0, 1], 6:], atol=1e-5, rtol=1e-5)
        cache.begin(0, {})
        logits = model(tokens[:1], cache=cache.select([0])).logits
        torch.testing.assert_close(logits, whole[:1], atol=1e-5, rtol=1e-5)

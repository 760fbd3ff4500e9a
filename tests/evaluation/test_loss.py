"""Validation: cross-entropy and bits per byte."""

from __future__ import annotations

import math
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from cases import RULES, small_model
from expert_threshold.data import Tokenizer, Tokens
from expert_threshold.evaluation import evaluate
from expert_threshold.model import GPT
from expert_threshold.routing import Rule
from ranks import run_on_ranks

CONTEXT = 16


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["the cat sat on the mat; the hat of the cat: ünïcödé"] * 4, 270)


def text(tokenizer: Tokenizer, count: int) -> Tokens:
    """Two documents, `count` tokens in all."""
    ids = np.random.default_rng(0).integers(0, tokenizer.bos, count).astype(np.uint16)
    ids[[0, count // 3]] = tokenizer.bos
    return Tokens(ids, np.array([0, count // 3, count]), int(tokenizer.token_bytes()[ids].sum()))


def make_model(tokenizer: Tokenizer, rule: Rule | None) -> GPT:
    return small_model(rule, steps=0, vocab_size=tokenizer.vocab_size, context=CONTEXT, layers=2).train()


def test_the_losses_are_those_of_one_forward_window_by_window(tokenizer: Tokenizer) -> None:
    model, tokens = make_model(tokenizer, RULES["expert_threshold"]), text(tokenizer, 3 * CONTEXT + 6)
    ids = torch.from_numpy(tokens.ids.astype(np.int64))
    losses, model = [], model.eval()
    for start in range(0, len(ids) - 1, CONTEXT):
        row = ids[start : start + CONTEXT + 1]
        with torch.no_grad():
            losses.append(torch.nn.functional.cross_entropy(model(row[None, :-1]).logits[0], row[1:], reduction="none"))
    nats, is_text = torch.cat(losses), ids[1:] != tokenizer.bos
    result = evaluate(model, tokens, tokenizer)
    assert result.loss == pytest.approx(float(nats.mean()), rel=1e-5)
    size = tokenizer.token_bytes()[tokens.ids[1:]].sum()
    assert result.bits_per_byte == pytest.approx(float(nats[is_text].sum()) / math.log(2) / size, rel=1e-5)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("count", [2, CONTEXT, 4 * CONTEXT + 1, 5 * CONTEXT + 7])
def test_the_batch_size_changes_nothing(tokenizer: Tokenizer, rule: Rule | None, count: int) -> None:
    model, tokens = make_model(tokenizer, rule), text(tokenizer, count)
    first, *others = [evaluate(model, tokens, tokenizer, batch_size=size) for size in (1, 3, 64)]
    assert first.tokens == count - 1
    assert all(observation.tokens == count - 1 for observation in first.observations), "no padding is observed"
    for other in others:
        assert other.loss == pytest.approx(first.loss, rel=1e-6)
        assert other.bits_per_byte == pytest.approx(first.bits_per_byte, rel=1e-6)
        assert (other.tokens, other.bytes) == (first.tokens, first.bytes)
        for a, b in zip(first.observations, other.observations, strict=True):
            torch.testing.assert_close(a, b)


def test_a_budget_is_rounded_up_to_whole_windows(tokenizer: Tokenizer) -> None:
    model, tokens = make_model(tokenizer, None), text(tokenizer, 6 * CONTEXT)
    told: list[tuple[int, int]] = []
    options = {"batch_size": 2, "max_tokens": 2 * CONTEXT + 1, "progress": lambda *at: told.append(at)}
    result = evaluate(model, tokens, tokenizer, **options)
    assert result.tokens == 3 * CONTEXT
    assert told == [(2 * CONTEXT, 3 * CONTEXT), (3 * CONTEXT, 3 * CONTEXT)]
    assert evaluate(model, tokens, tokenizer, max_tokens=10**9).tokens == len(tokens) - 1


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("training_pools", [True, False])
def test_the_model_keeps_mode_state_and_gradients_also_after_an_error(
    tokenizer: Tokenizer, training: bool, training_pools: bool
) -> None:
    model = make_model(tokenizer, RULES["expert_choice"]).train(training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = []
    model.blocks[1].register_forward_hook(lambda module, *_: modes.append(module.training))
    options = {"batch_size": 2, "training_pools": training_pools}
    evaluate(model, text(tokenizer, 40), tokenizer, **options)
    assert model.training == training
    with pytest.raises(RuntimeError, match="stop"):
        evaluate(model, text(tokenizer, 40), tokenizer, **options, progress=Mock(side_effect=RuntimeError("stop")))
    assert modes
    assert set(modes) == {training_pools}
    assert all(module.training == training for module in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())


def test_pools_give_exact_loads_and_causal_evaluation_need_not(tokenizer: Tokenizer) -> None:
    model, tokens = make_model(tokenizer, RULES["expert_choice"]), text(tokenizer, 5 * CONTEXT + 1)
    pooled = evaluate(model, tokens, tokenizer, batch_size=2, training_pools=True)
    assert pooled.tokens == 4 * CONTEXT  # the fifth window fills no batch
    (observation,) = pooled.observations
    assert observation.load.tolist() == [4 * CONTEXT // 4] * 4
    (causal,) = evaluate(model, tokens, tokenizer).observations
    assert causal.load.tolist() != [5 * CONTEXT // 4] * 4


def test_nonsense_is_refused_in_one_line_that_names_it(tokenizer: Tokenizer) -> None:
    model, tokens = make_model(tokenizer, RULES["expert_choice"]), text(tokenizer, 2 * CONTEXT)
    with pytest.raises(ValueError, match="needs 2 tokens but has 1"):
        evaluate(model, text(tokenizer, 1), tokenizer)
    with pytest.raises(ValueError, match="needs 33 tokens but has 32"):
        evaluate(model, tokens, tokenizer, batch_size=2, training_pools=True)
    for options in ({"batch_size": 0}, {"max_tokens": 0}):
        with pytest.raises(ValueError, match=r"=0.* must be at least 1"):
            evaluate(model, tokens, tokenizer, **options)


@pytest.mark.parametrize("ranks", [*(pytest.param(ranks, marks=pytest.mark.soak) for ranks in (1, 2)), 3])
def test_the_number_of_ranks_changes_nothing(ranks: int, tmp_path: Path) -> None:
    run_on_ranks(Path(__file__).with_name("across_ranks.py"), ranks, tmp_path)

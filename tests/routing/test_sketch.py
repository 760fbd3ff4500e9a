"""Sketches of scores, and the cutoffs for other rates that follow from them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from expert_threshold.routing import CutoffState, ExpertChoice, ExpertThreshold, cutoff, dial
from expert_threshold.routing.cutoffs import LEVELS, SAMPLE, batch_sketch, quantile, sketch

EXPERTS = 4


def skewed(tokens: int, seed: int = 0) -> Tensor:
    """Return scores (1, tokens, experts) with a different mean, spread and tail for each expert."""
    normal = torch.randn(1, tokens, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return normal.mul(0.2 * torch.arange(1, EXPERTS + 1)).exp() + torch.arange(EXPERTS)


def trained(rule: ExpertChoice | ExpertThreshold, tokens: int = 2048, steps: int = 40) -> CutoffState:
    state = rule.init()
    for step in range(steps):
        state = rule.update(state, rule.route(skewed(tokens, step), state, training=True).observation)
    return state


RULES = [ExpertChoice(EXPERTS, decay=0.95), ExpertThreshold(EXPERTS, decay=0.95, warmup_steps=3)]
each = pytest.mark.parametrize("rule", RULES, ids=["expert choice", "expert threshold"])


@each
@pytest.mark.parametrize("rate", [0.1, 0.25, 0.5, 1, 2, 3.5])
@pytest.mark.parametrize("tokens", [2048, 8192])
def test_the_rate_on_new_tokens_is_the_one_asked_for(rule: ExpertThreshold, rate: float, tokens: int) -> None:
    cutoffs = cutoff(dial(trained(rule, tokens), rate))
    usage = (skewed(200_000, 999) > cutoffs).float().mean((0, 1))
    torch.testing.assert_close(usage, torch.full_like(usage, rate / EXPERTS), rtol=0.1, atol=0)
    assert float(usage.sum()) == pytest.approx(rate, rel=0.05)


@each
def test_a_lower_rate_never_adds_an_expert(rule: ExpertThreshold) -> None:
    state = trained(rule)
    cutoffs = torch.stack([cutoff(dial(state, rate)) for rate in torch.linspace(0, EXPERTS, 200).tolist()])
    assert (cutoffs[1:] < cutoffs[:-1]).all()


@pytest.mark.parametrize("debias", [True, False])
def test_the_running_mean_of_sketches_is_debiased_from_its_own_beginning(debias: bool) -> None:
    rule = ExpertThreshold(EXPERTS, decay=0.9, debias=debias)
    state = rule.init()._replace(step=torch.tensor(50), weight=torch.tensor(1.0))  # without a sketch yet
    scores = [skewed(128, seed) for seed in (1, 2)]
    for each_scores in scores:
        state = rule.update(state, rule.route(each_scores, state, training=True).observation)
    first, second = (sketch(s[0]) for s in scores)
    torch.testing.assert_close(state.sketch / state.sketch_weight, (0.9 * first + second) / 1.9)


def test_micro_batches_count_by_their_tokens() -> None:
    rule = ExpertThreshold(EXPERTS)
    scores = [skewed(40, 1), skewed(120, 2)]
    one, other = (rule.route(s, rule.init(), training=True).observation for s in scores)
    expected = (sketch(scores[0][0]) + 3 * sketch(scores[1][0])) / 4
    torch.testing.assert_close(batch_sketch(one + other), expected)
    torch.testing.assert_close(batch_sketch(other + one), expected)


def test_a_sketch_is_the_same_whatever_the_pools() -> None:
    scores = skewed(256).reshape(4, 64, EXPERTS)
    found = [
        batch_sketch(rule.route(scores, rule.init(), training=True).observation)
        for rule in (replace(RULES[0], pool=pool) for pool in ("sequence", "batch", "global", 32))
    ]
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_large_batches_are_sampled_at_all_positions_of_a_sequence() -> None:
    context = 64
    position = torch.arange(4096 * context).remainder(context).float()[:, None]
    found = sketch(position)
    whole = torch.linspace(0, 1, LEVELS)
    assert len(found) == LEVELS
    assert found.min() <= 1
    assert found.max() >= context - 2
    assert ((found.flip(0)[:, 0] - position.quantile(whole, dim=0)[:, 0]).abs() < context).all()
    stride = -(-len(position) // SAMPLE) | 1
    assert position[::stride].unique().numel() == context


def test_levels_are_symmetric_about_the_median() -> None:
    scores = skewed(301)[0]
    found = sketch(scores)
    torch.testing.assert_close(found[LEVELS // 2], scores.median(0).values)
    torch.testing.assert_close(sketch(-scores), -found.flip(0), rtol=1e-4, atol=1e-4)


def test_beyond_the_last_level_the_tail_goes_on() -> None:
    found = sketch(torch.randn(2048, EXPERTS, generator=torch.Generator().manual_seed(0)))
    inside = quantile(found, 1 / (1 + math.exp(7.5)))
    torch.testing.assert_close(inside, found[0])
    further = quantile(found, 1e-6)
    assert (further > inside).all()
    assert further.isfinite().all()


def test_a_rate_out_of_range_or_without_a_sketch_is_refused() -> None:
    for rate in (-0.1, EXPERTS + 0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"rate={rate} must be between 0 and num_experts=4"):
            dial(trained(RULES[0], steps=1), rate)
    with pytest.raises(ValueError, match=r"rate=2 needs a sketch of scores.* et calibrate"):
        dial(RULES[0].init(), 2)

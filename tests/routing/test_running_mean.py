"""The running mean of cutoffs, warmup, and capacity bounds over time."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from expert_threshold.routing import CutoffState, ExpertChoice, ExpertThreshold, cutoff, dial
from expert_threshold.testing import same

EXPERTS = 3


def make_scores(seed: int, tokens: int = 24) -> Tensor:
    return torch.randn(1, tokens, EXPERTS, generator=torch.Generator().manual_seed(seed))


@functools.cache
def batch_cutoffs(rule: ExpertChoice | ExpertThreshold, steps: int) -> tuple[list[Tensor], CutoffState]:
    """The batch cutoff of every step, and the state after them."""
    state, seen = rule.init(), []
    for step in range(steps):
        observation = rule.route(make_scores(step), state, training=True).observation
        seen.append(observation.batch_cutoff)
        state = rule.update(state, observation)
    return seen, state


def rules(**options: Any) -> list[ExpertChoice | ExpertThreshold]:
    return [ExpertChoice(EXPERTS, **options), ExpertThreshold(EXPERTS, warmup_steps=2, **options)]


FOLLOWING: dict[str, ExpertChoice | ExpertThreshold] = {
    "choice": ExpertChoice(EXPERTS, decay=0.9),
    "mean": ExpertThreshold(EXPERTS, decay=0.9),
    "biased": ExpertThreshold(EXPERTS, decay=0.9, debias=False),
    "trend": ExpertThreshold(EXPERTS, decay=0.6, estimator="trend"),
}


@pytest.mark.parametrize("name", FOLLOWING)
def test_a_new_run_at_another_rate_starts_from_the_cutoffs_of_that_rate(name: str) -> None:
    old = batch_cutoffs(FOLLOWING[name], 5)[1]
    rule = replace(FOLLOWING[name], experts_per_token=2)
    torch.testing.assert_close(cutoff(rule.begin_run(old, 1)), cutoff(dial(old, 2)))
    older = old._replace(sketch=torch.zeros_like(old.sketch), sketch_weight=torch.tensor(0.0))
    assert cutoff(rule.begin_run(older, 1)).tolist() == [0] * EXPERTS


@pytest.mark.parametrize("name", FOLLOWING)
def test_a_new_run_in_which_every_expert_takes_every_token_starts_from_finite_cutoffs(name: str) -> None:
    """Regression: they started at −∞ and became NaN, so that no expert received a token from the second step on."""
    old = batch_cutoffs(FOLLOWING[name], 5)[1]
    rule = replace(FOLLOWING[name], experts_per_token=EXPERTS)
    state = rule.begin_run(old, 1)
    for _ in range(3):
        assert cutoff(state).isfinite().all()
        routing = rule.route(make_scores(7), state, training=True)
        assert routing.assignment.float().mean() > 0.9
        state = rule.update(state, routing.observation)


def test_the_cutoff_before_the_first_update_is_zero() -> None:
    scores = make_scores(0)
    for rule in [*rules(), *rules(debias=False)]:
        assert cutoff(rule.init()).tolist() == [0] * EXPERTS
        assert torch.equal(rule.route(scores, rule.init(), training=False).assignment, scores > 0)


@given(decay=st.floats(0, 0.999), steps=st.integers(1, 12), debias=st.booleans())
def test_the_mean_is_the_papers_recursion_or_debiased_like_adam(decay: float, steps: int, debias: bool) -> None:
    for rule in rules(decay=decay, debias=debias):
        seen, state = batch_cutoffs(rule, steps)
        c = torch.zeros(EXPERTS)
        for batch_cutoff in seen:
            c = decay * c + (1 - decay) * batch_cutoff
        expected = c / (1 - decay**steps) if debias else c
        torch.testing.assert_close(cutoff(state), expected, rtol=1e-4, atol=1e-4)


def test_micro_batches_and_pools_count_once_each() -> None:
    rule = ExpertThreshold(EXPERTS, decay=0.5, pool=12)
    first, second = (rule.route(make_scores(seed, 24), rule.init(), training=True).observation for seed in (0, 1))
    pools = torch.cat([make_scores(0), make_scores(1)]).reshape(4, 12, EXPERTS)
    expected = pools.sort(dim=1, descending=True).values[:, 3].mean(0)  # k = 12 / 3
    torch.testing.assert_close((first + second).batch_cutoff, expected)
    torch.testing.assert_close(cutoff(rule.update(rule.init(), first + second)), expected)


def test_observations_of_inference_move_no_cutoff() -> None:
    for rule in rules():
        _, state = batch_cutoffs(rule, 3)
        observation = rule.route(make_scores(9), state, training=False).observation
        after = rule.update(state, observation)
        assert all(torch.equal(a, b) for a, b in zip(after, state, strict=True))


def test_warmup_is_expert_choice_and_ends_after_its_last_step() -> None:
    warmup_steps = 3
    threshold = ExpertThreshold(EXPERTS, warmup_steps=warmup_steps, capacity_slack=None, decay=0.5)
    choice = ExpertChoice(EXPERTS, decay=0.5)
    state = threshold.init()
    for step in range(6):
        scores = make_scores(step)
        routing = threshold.route(scores, state, training=True)
        if step < warmup_steps:
            expected = choice.route(scores, state, training=True)
            assert same(routing.observation, expected.observation)
        else:
            expected = threshold.route(scores, state, training=False)
            assert not torch.equal(expected.assignment, choice.route(scores, state, training=True).assignment)
        assert torch.equal(routing.assignment, expected.assignment)
        state = threshold.update(state, routing.observation)
    assert state.step == 6


@pytest.mark.parametrize(("slack", "fewest", "most"), [(None, 0, 24), (0.5, 4, 12), (0, 8, 8)])
def test_as_many_go_as_exceed_the_cutoff_in_training_within_bounds(slack: float | None, fewest: int, most: int) -> None:
    rule, scores = ExpertThreshold(EXPERTS, warmup_steps=0, capacity_slack=slack), make_scores(0)
    ordered, order = scores[0].sort(dim=0, descending=True)
    for above in range(25):  # the cutoff is the next score, or just below the lowest
        mean = ordered[above] if above < 24 else torch.nextafter(ordered[-1], ordered[-1] - 1)
        state = rule.init()._replace(mean=mean, weight=torch.tensor(1.0))
        for training, load in ((True, min(max(above, fewest), most)), (False, above)):
            taken = rule.route(scores, state, training=training).assignment[0]
            assert torch.equal(taken.gather(0, order), (torch.arange(24) < load)[:, None].expand(24, EXPERTS))


def drifting(rule: ExpertThreshold, steps: int, drift: float) -> tuple[Tensor, Tensor]:
    """Return the cutoff after steps in which all scores rose by `drift`, and the cutoff of the next batch."""
    state = rule.init()
    for step in range(steps):
        scores = make_scores(0) + drift * step
        state = rule.update(state, rule.route(scores, state, training=True).observation)
    return cutoff(state), rule.route(make_scores(0) + drift * steps, state, training=True).observation.batch_cutoff


def test_a_trend_keeps_up_with_scores_that_drift_where_the_mean_lags_behind() -> None:
    mean, batch = drifting(ExpertThreshold(EXPERTS, decay=0.8), 200, 0.1)
    torch.testing.assert_close(batch - mean, torch.full((EXPERTS,), 0.1 / (1 - 0.8)), rtol=1e-3, atol=1e-3)
    trend, batch = drifting(ExpertThreshold(EXPERTS, decay=0.8, estimator="trend"), 200, 0.1)
    torch.testing.assert_close(trend, batch, rtol=1e-4, atol=1e-4)


def test_a_trend_is_critically_damped() -> None:
    """After a jump of the scores from 0 to 1 the error is that of a double root r = √β: rⁿ − n (1 − r) rⁿ⁻¹."""
    rule = ExpertThreshold(EXPERTS, decay=0.64, estimator="trend")
    state, r = rule.init(), 0.8
    for step in range(12):
        batch = rule.route(make_scores(0) + min(step, 1), state, training=True).observation
        if step:
            n = step - 1
            expected = torch.full((EXPERTS,), r**n - n * (1 - r) * r ** (n - 1))
            torch.testing.assert_close(batch.batch_cutoff - cutoff(state), expected, rtol=1e-4, atol=1e-4)
        state = rule.update(state, batch)


@pytest.mark.parametrize("later", FOLLOWING)
@pytest.mark.parametrize("earlier", FOLLOWING)
@pytest.mark.parametrize(("steps", "new_run"), [(4, False), (0, True), (4, True), (20, True)])
def test_an_estimator_goes_on_from_another_ones_cutoff(earlier: str, later: str, steps: int, new_run: bool) -> None:
    """Regression: a trend used the undebiased mean as its level, and a mean kept a trend's last slope forever."""
    began, rule = FOLLOWING[earlier], FOLLOWING[later]
    state = began.init()
    for step in range(steps):  # scores that rise, so that a trend has a slope and a mean of weight 0.34 lags
        state = began.update(state, began.route(make_scores(0) + step, state, training=True).observation)
    level = cutoff(state)
    if new_run:
        state = rule.begin_run(state, 1)
        assert state.step == 0
        torch.testing.assert_close(cutoff(state), level)
    scores = make_scores(0) + level - make_scores(0)[0].topk(8, 0).values[-1]  # whose batch cutoff is c
    observation = rule.route(scores, state, training=True).observation
    torch.testing.assert_close(observation.batch_cutoff, level)
    for step in range(300):
        state = rule.update(state, observation)
        # What a trend had learned of its slope is its own; nothing else moves what a steady batch agrees with.
        moves = earlier == later == "trend" and not new_run
        assert (cutoff(state) - level).abs().max() < (1.5 if moves else 1e-4), step
    torch.testing.assert_close(cutoff(state), level, rtol=1e-4, atol=1e-4)
    assert state.slope.abs().max() < 1e-4
    assert state.step == 300 + (0 if new_run else steps)

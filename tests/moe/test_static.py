"""Static buffers: bounds that hold, and enough, too many and too few rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from expert_threshold.moe import Experts
from expert_threshold.moe.backends import BACKENDS, reference
from expert_threshold.routing import ExpertChoice, ExpertThreshold, Rule, TokenChoice


@st.composite
def pooled_rules(draw: Any) -> tuple[Rule, int, int]:
    """Expert choice or threshold, with any pool that divides so many sequences of such a length."""
    num_experts = draw(st.sampled_from([1, 2, 3, 5, 8]))
    per_token = draw(st.sampled_from([rate for rate in (0.1, 0.3, 1, 1.1, 1.7, 2, 2.9) if rate <= num_experts]))
    sequences, time = draw(st.integers(1, 4)), draw(st.sampled_from([4, 7, 12, 30]))
    divisors = [size for size in range(1, sequences * time + 1) if sequences * time % size == 0]
    pool = draw(st.sampled_from(["sequence", "batch", "global", *divisors]))
    if draw(st.booleans()):
        return ExpertChoice(num_experts, per_token, pool=pool), sequences, time
    slack = draw(st.sampled_from([0, 1e-3, 0.1, 0.5, 1, 7]))
    warmup = draw(st.sampled_from([0, 5]))
    rule = ExpertThreshold(num_experts, per_token, warmup_steps=warmup, capacity_slack=slack, pool=pool)
    return rule, sequences, time


@settings(max_examples=150)
@given(case=pooled_rules(), seed=st.integers(0, 99), cutoff=st.sampled_from([-9.0, 0.0, 9.0]), ties=st.booleans())
def test_no_rule_assigns_more_pairs_than_it_says(
    case: tuple[Rule, int, int], seed: int, cutoff: float, ties: bool
) -> None:
    rule, sequences, time = case
    scores = torch.randn(sequences, time, rule.num_experts, generator=torch.Generator().manual_seed(seed))
    scores = scores.round() if ties else scores
    state = rule.init()
    state = state._replace(mean=torch.full_like(state.mean, cutoff), weight=torch.ones(()))
    try:
        assignment = rule.route(scores, state, training=True).assignment
    except ValueError:  # a pool so small that experts get no token
        assume(False)
    most = rule.max_pairs(sequences * time, training=True)
    assert most is not None
    assert assignment.sum() <= most <= sequences * time * rule.num_experts


def test_max_pairs_is_exact_for_token_choice_and_none_without_a_bound() -> None:
    assert TokenChoice(8, 3).max_pairs(10, training=True) == 30
    assert TokenChoice(8, 3).max_pairs(10, training=False) == 30
    assert ExpertThreshold(8).max_pairs(10, training=False) is None
    assert ExpertThreshold(8, capacity_slack=None).max_pairs(10, training=True) is None
    assert ExpertThreshold(8).max_pairs(10, training=True, ranks=2) is None  # one rank's may be all of the pool's
    assert ExpertThreshold(8, pool="batch").max_pairs(10, training=True, ranks=2) == 15
    assert ExpertThreshold(4, 3, capacity_slack=0.5).max_pairs(10, training=True) == 40  # no more than there are


@pytest.mark.parametrize("surplus", [0, 1, 17])
def test_rows_beyond_those_in_use_change_nothing(surplus: int) -> None:
    torch.manual_seed(0)
    x, gates, assignment, experts = torch.randn(9, 8), torch.rand(9, 4), torch.rand(9, 4) < 0.4, Experts(4, 8, 12)
    found = BACKENDS["static"](x, gates, assignment, experts, rows=int(assignment.sum()) + surplus)
    torch.testing.assert_close(found, reference(x, gates, assignment, experts))


def test_too_few_rows_are_refused_rather_than_dropped() -> None:
    assignment = torch.ones(3, 4, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="more pairs of tokens and experts than the 11 rows"):
        BACKENDS["static"](torch.randn(3, 8), torch.rand(3, 4), assignment, Experts(4, 8, 12), rows=11)

"""The rule keeps the contract of rules, does what its equation says, and reaches the fanout aimed at."""

from __future__ import annotations

import pytest
import torch
from min_p_rule import MinP, MinPState

from expert_threshold.routing import Rule
from expert_threshold.testing import check_ranks, check_rule


@pytest.mark.parametrize("rule", MinP.cases().values(), ids=MinP.cases())
def test_it_keeps_the_contract(rule: Rule) -> None:
    check_rule(rule, ranks=False)


def test_two_ranks_equal_one() -> None:
    check_ranks(list(MinP.cases().values()))


def test_an_expert_needs_p_times_the_largest_share() -> None:
    rule = MinP(num_experts=3, experts_per_token=1)
    scores = torch.tensor([[[0.5, 0.3, 0.2], [0.9, 0.05, 0.05]]]).log()
    routing = rule.route(scores, MinPState(torch.tensor(0.55).log()), training=True)
    assert routing.assignment.tolist() == [[[True, True, False], [True, False, False]]]
    torch.testing.assert_close(routing.gates, scores.exp())


def test_p_moves_until_the_mean_fanout_is_the_one_aimed_at() -> None:
    rule = MinP(num_experts=8, experts_per_token=3)
    state = rule.init()
    for step in range(100):
        scores = torch.randn(4, 256, 8, generator=torch.Generator().manual_seed(step))
        observation = rule.route(scores, state, training=True).observation
        state = rule.update(state, observation)
    assert float(observation.fanout_mean) == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts_per_token": 0.5}, "experts_per_token=0.5 must be at least 1"),
        ({"p_start": 0.0}, "p_start=0.0 must be a number above 0 and at most 1"),
        ({"p_rate": 2.0}, "p_rate=2.0 must be a number of at least 0 and at most 1"),
    ],
)
def test_nonsense_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MinP(**options)

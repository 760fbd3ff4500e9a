"""Top-p routing: by its definition, equal to the published code, and steered to its mean fanout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from expert_threshold.config import scaled_rule
from expert_threshold.routing import TopP

EXPERTS = 6


def make_scores(seed: int = 0, spread: float = 1.5) -> Tensor:
    return torch.randn(3, 16, EXPERTS, generator=torch.Generator().manual_seed(seed)) * spread


def published(shares: Tensor, p: float) -> Tensor:
    """The weights (tokens, experts) of ZhenweiAn/Dynamic_MoE, 0 where an expert is not taken."""
    ordered, order = torch.sort(shares, descending=True)
    beyond = ordered.cumsum(-1) > p
    first = torch.nn.functional.one_hot(beyond.long().argmax(-1), shares.shape[-1]).bool()
    return torch.zeros_like(shares).scatter(1, order, torch.where(beyond & ~first, 0.0, ordered))


@pytest.mark.parametrize("p", [0.05, 0.4, 0.7, 0.95])
def test_experts_and_gates_are_those_of_the_published_code(p: float) -> None:
    rule, scores = TopP(EXPERTS, p=p), make_scores(1)
    for training in (True, False):
        routing = rule.route(scores, rule.init(), training=training)
        theirs = published(scores.flatten(0, 1).softmax(-1), p)
        assert torch.equal(routing.assignment.flatten(0, 1), theirs > 0)
        torch.testing.assert_close((routing.gates * routing.assignment).flatten(0, 1), theirs)


def test_equals_go_to_the_lower_expert_and_a_sum_of_exactly_p_is_enough() -> None:
    rule = TopP(4, p=0.5)
    taken = rule.route(torch.zeros(1, 1, 4), rule.init(), training=True).assignment
    assert taken.flatten().tolist() == [True, True, False, False]


def test_a_fixed_p_stays_and_is_that_of_the_options_whatever_the_state_says() -> None:
    rule, other = TopP(EXPERTS, p=0.3), TopP(EXPERTS, p=0.9)
    seen = rule.route(make_scores(), rule.init(), training=True).observation
    assert rule.update(rule.init(), seen) == rule.init()
    ours, theirs = (rule.route(make_scores(), state, training=False) for state in (rule.init(), other.init()))
    assert torch.equal(ours.assignment, theirs.assignment)
    torch.testing.assert_close(rule.describe(other.init())["p"], torch.tensor(0.3))


def test_the_controller_moves_p_by_hand() -> None:
    rule = TopP(4, 2, p=0.5, controller=True, p_rate=0.1)
    state = rule.init()
    one = rule.route(torch.tensor([[[9.0, 0, 0, 0]]]), state, training=True).observation  # one expert: e = 1/4
    state = rule.update(state, one)
    torch.testing.assert_close(state.p, torch.tensor(0.5 + 0.1 * 0.25 + 0.1 * 0.25))
    state = rule.update(state, one)  # the error is the same: the integral alone goes on
    torch.testing.assert_close(state.p, torch.tensor(0.55 + 0.1 * 0.25))


@pytest.mark.parametrize("fanout", [1.5, 2.5, 4])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_the_controller_reaches_its_fanout_and_follows_it(fanout: float, spread: float) -> None:
    rule = TopP(EXPERTS, fanout, controller=True)
    state, fanouts = rule.init(), []
    for step in range(500):
        seen = rule.route(make_scores(step, spread), state, training=True).observation
        state = rule.update(state, seen)
        fanouts.append(float(seen.fanout_mean))
    assert sum(fanouts[-100:]) / 100 == pytest.approx(fanout, rel=0.05)
    assert 1 / EXPERTS <= state.p <= 1


def test_gains_of_a_short_run_are_larger_and_never_wild() -> None:
    rates = [rule.p_rate for steps in (1, 100, 10_000) if isinstance(rule := scaled_rule("top_p", steps), TopP)]
    assert rates == [0.2, 0.1, 0.02]

"""Balance of token choice: auxiliary losses and biases, by hand and at work."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from expert_threshold.routing import Observation, TokenChoice
from expert_threshold.routing.balance import move_bias, normalised_load
from expert_threshold.routing.observation import observe
from expert_threshold.routing.token_choice import Balance, BiasState


def observed(load: list[int]) -> Observation:
    """Build a batch in which that many tokens chose each expert, one expert per token."""
    chosen = torch.repeat_interleave(torch.arange(len(load)), torch.tensor(load))
    assignment = torch.nn.functional.one_hot(chosen, len(load)).bool()[None]
    return observe(torch.zeros(assignment.shape), assignment, target=sum(load) / len(load))


def logit(gate: float) -> float:
    return torch.tensor(gate).logit().item()


def test_the_auxiliary_loss_by_hand() -> None:
    # Two tokens choose expert 0 and none expert 1: f = (2, 0); mean gates P = ((0.8 + 0.6) / 2, (0.3 + 0.1) / 2).
    scores = torch.tensor([[[logit(0.8), logit(0.3)], [logit(0.6), logit(0.1)]]])
    routing = TokenChoice(2, balance="aux", aux_strength=0.5).route(scores, BiasState(torch.zeros(2)), training=True)
    assert routing.loss is not None
    torch.testing.assert_close(routing.loss, torch.tensor(0.5 * (2 * 0.7 + 0 * 0.2)))


def test_the_auxiliary_loss_is_differentiable_through_the_mean_gate_alone() -> None:
    scores = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    rule = TokenChoice(3, balance="aux", aux_strength=0.1)
    routing = rule.route(scores, rule.init(), training=True)
    (gradient,) = torch.autograd.grad(routing.loss, scores)  # type: ignore[type-var]
    f, gates = 3 * routing.observation.load / 8, scores.detach().sigmoid()
    torch.testing.assert_close(gradient, 0.1 * f * gates * (1 - gates) / 8)


@pytest.mark.parametrize(
    ("load", "expected"), [([2, 2], [1, 1]), ([3, 1], [1.5, 0.5]), ([4, 0], [2, 0]), ([0, 0], [1, 1])]
)
def test_normalised_load_is_one_under_balance_and_where_nothing_was_routed(
    load: list[int], expected: list[float]
) -> None:
    torch.testing.assert_close(normalised_load(torch.tensor(load)), torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize(
    ("proportional", "expected"),
    # Loads 5, 4, 3, 0 over a mean of 3: f = 5/3, 4/3, 1, 0.
    [(False, [-1, -1, 0, 1]), (True, [-2 / 3, -1 / 3, 0, 1])],
)
def test_biases_move_against_the_load_by_its_sign_or_in_proportion(proportional: bool, expected: list[float]) -> None:
    bias = torch.tensor([1.0, 2.0, 3.0, 4.0])
    moved = move_bias(bias, torch.tensor([5, 4, 3, 0]), rate=0.1, proportional=proportional)
    torch.testing.assert_close(moved, bias + 0.1 * torch.tensor(expected, dtype=torch.float32))


def test_a_step_over_micro_batches_moves_biases_once_by_the_summed_load() -> None:
    rule = TokenChoice(2, balance="loss_free")
    both = observed([4, 0]) + observed([0, 5])
    assert rule.update(rule.init(), both).bias.tolist() == pytest.approx([0.005, -0.005])


def test_the_bias_decides_the_selection_but_no_gate_and_no_moment() -> None:
    rule = TokenChoice(2, balance="loss_free")
    scores = torch.tensor([[[1.0, 0.0]]])
    routing = rule.route(scores, BiasState(torch.tensor([0.0, 5.0])), training=False)
    assert routing.assignment.tolist() == [[[False, True]]]
    assert routing.scores is scores
    assert routing.observation.score_sum.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("balance", ["none", "aux", "global_aux"])
def test_no_bias_moves_unless_balance_is_loss_free(balance: str) -> None:
    rule = TokenChoice(2, balance=balance)  # type: ignore[arg-type]
    assert rule.update(rule.init(), observed([4, 0])).bias.tolist() == [0, 0]


def skewed(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 512, 4, generator=generator) + torch.tensor([1.5, 0.5, -0.5, -1.5])


@pytest.mark.parametrize("balance", ["loss_free", "loss_free_proportional"])
def test_biases_bring_a_skewed_router_into_balance(balance: str) -> None:
    rule = TokenChoice(4, balance=balance, bias_rate=0.02)  # type: ignore[arg-type]
    state = rule.init()
    before = rule.route(skewed(1), state, training=False).observation.load_spread
    for step in range(300):
        state = rule.update(state, rule.route(skewed(step), state, training=True).observation)
    after = rule.route(skewed(1), state, training=False).observation.load_spread
    assert before > 2
    assert after < 1.15


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.25, 8.0])
@pytest.mark.parametrize("balance", ["aux", "loss_free"])
def test_beyond_its_capacity_an_expert_drops_the_smallest_gates_in_training_and_balance_counts_every_choice(
    balance: Balance, factor: float
) -> None:
    scores = torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(1)).round(decimals=1)  # with ties
    scores[..., 0] += 1
    plain = TokenChoice(4, 2, balance=balance, gate="softmax", over="scores")
    bounded = replace(plain, capacity_factor=factor)
    everything, kept = (rule.route(scores, plain.init(), training=True) for rule in (plain, bounded))
    gates, chosen = everything.gates.flatten(0, 1), everything.assignment.flatten(0, 1)
    capacity = math.ceil(Fraction(str(factor)) * 21 * 2 / 4)
    expected = torch.zeros_like(chosen)
    for expert in range(4):
        tokens = sorted(chosen[:, expert].nonzero().flatten().tolist(), key=lambda t: (-gates[t, expert], t))
        expected[tokens[:capacity], expert] = True
    assert torch.equal(kept.assignment.flatten(0, 1), expected)
    assert torch.equal(kept.gates, everything.gates)
    assert kept.observation.raw_load.tolist() == chosen.sum(0).tolist()
    if balance == "aux":
        assert torch.equal(kept.loss, everything.loss)  # type: ignore[arg-type]
    moved = [rule.update(plain.init(), routing.observation) for rule, routing in ((plain, everything), (bounded, kept))]
    assert torch.equal(moved[0].bias, moved[1].bias)
    assert torch.equal(bounded.route(scores, plain.init(), training=False).assignment, everything.assignment)

"""ReLU routing: by its definition, equal to the published code, and steered to its mean fanout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from expert_threshold.config import scaled_rule
from expert_threshold.routing import ReLU

EXPERTS = 6


def make_scores(seed: int = 0) -> Tensor:
    scores = torch.randn(3, 16, EXPERTS, generator=torch.Generator().manual_seed(seed))
    scores[0, 0] = 0.0
    return scores


def published_l1(probs: Tensor, topk: float, coefficient: float) -> Tensor:
    """The computation of thu-ml/ReMoE on one rank: switch_load_balancing_loss_func of ReLU's outputs."""
    tokens, experts = probs.shape
    tokens_per_expert = (probs > 0).sum(dim=0)
    return (probs.sum(dim=0) * tokens_per_expert).sum() * (experts * coefficient / (tokens * tokens * topk))


def published_step(coefficient: float, sparsity: float, topk: float) -> float:
    return coefficient * 1.2 if sparsity < 1 - topk / EXPERTS else coefficient / 1.2


def test_every_positive_score_is_taken_and_is_its_own_gate() -> None:
    rule, scores = ReLU(EXPERTS), make_scores()
    for training in (True, False):
        routing = rule.route(scores, rule.init(), training=training)
        for row, taken, gates in zip(*(x.flatten(0, 1).tolist() for x in (scores, *routing[2:0:-1])), strict=True):
            assert taken == [r > 0 for r in row]
            assert gates == [max(r, 0.0) for r in row]


@pytest.mark.parametrize("fanout", [1, 2.5])
def test_the_loss_is_that_of_the_published_code(fanout: float) -> None:
    rule, scores = ReLU(EXPERTS, fanout, l1_start=0.25), make_scores(1).requires_grad_()
    loss = rule.route(scores, rule.init(), training=True).loss
    theirs = published_l1(scores.relu().flatten(0, 1), fanout, 0.25)
    assert loss is not None
    torch.testing.assert_close(loss, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(each, scores)[0] for each in (loss, theirs)))


def test_the_unbalanced_loss_is_the_mean_l1_norm_of_a_tokens_gates() -> None:
    rule, scores = ReLU(EXPERTS, l1_start=0.5, l1_balanced=False), make_scores(2)
    loss = rule.route(scores, rule.init(), training=True).loss
    assert loss is not None
    torch.testing.assert_close(loss, 0.5 * scores.clamp(min=0).sum(-1).mean())


def test_lambda_moves_as_in_the_published_code() -> None:
    rule = ReLU(EXPERTS, 2)
    state, theirs = rule.init(), 1e-8
    torch.testing.assert_close(rule.describe(state)["lambda"], torch.tensor(1e-8))
    for step in range(12):
        shift = -1.5 if step % 3 == 0 else 0.3
        routing = rule.route(make_scores(step) + shift, state, training=True)
        state = rule.update(state, routing.observation)
        theirs = published_step(theirs, 1 - routing.assignment.float().mean().item(), 2)
        torch.testing.assert_close(rule.describe(state)["lambda"], torch.tensor(theirs), rtol=1e-4, atol=0)


def test_lambda_rests_at_the_target_and_without_a_rate() -> None:
    scores = make_scores().abs() + 0.1
    for rule in (ReLU(EXPERTS, EXPERTS), ReLU(EXPERTS, 1, l1_rate=0.0)):
        seen = rule.route(scores, rule.init(), training=True).observation
        assert rule.update(rule.init(), seen) == rule.init()


def test_the_loss_steers_the_fanout_to_the_target() -> None:
    rule = ReLU(EXPERTS, 1, l1_start=1e-3)
    state, bias = rule.init(), torch.zeros(EXPERTS, requires_grad=True)
    fanouts = []
    for step in range(200):
        routing = rule.route(make_scores(step) + bias, state, training=True)
        assert routing.loss is not None
        (gradient,) = torch.autograd.grad(routing.loss - 0.01 * routing.gates.mean(), bias)  # a task that wants more
        bias = (bias - 2 * gradient).detach().requires_grad_()
        state = rule.update(state, routing.observation)
        fanouts.append(float(routing.observation.fanout_mean))
    assert fanouts[0] > 2.5
    assert sum(fanouts[-50:]) / 50 == pytest.approx(1, abs=0.3)


def test_a_short_run_begins_with_a_larger_lambda_and_the_published_length_with_the_published_one() -> None:
    assert scaled_rule("relu", 60_000) == ReLU()
    assert scaled_rule("relu", 9_999, l1_rate=2.0) == ReLU(l1_rate=2.0)  # 3^1000 is no float
    assert not ReLU(l1_rate=0).aims_at_fanout  # nothing moves λ
    assert scaled_rule("relu", 100, l1_rate=1e300) == ReLU(l1_rate=1e300)
    short = scaled_rule("relu", 300)
    assert isinstance(short, ReLU)
    assert short.l1_start * 1.2**30 == pytest.approx(0.001, rel=0.01)
    assert scaled_rule("relu", 300, l1_start=1e-8) == ReLU()

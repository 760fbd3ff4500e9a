"""ReLU, top-p, sequence top-k and null slots equal their definitions and published code, and reach their targets."""

from __future__ import annotations

import itertools
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from expert_threshold import MoE
from expert_threshold.config import scaled_rule
from expert_threshold.routing import NullSlots, NullSlotState, ReLU, Rule, SeqTopK, TokenChoice, TopP

EXPERTS = 6
both_modes = pytest.mark.parametrize("training", [True, False])


def make_scores(seed: int = 0, *, spread: float = 1.0, width: int = EXPERTS) -> Tensor:
    return torch.randn(3, 16, width, generator=torch.Generator().manual_seed(seed)) * spread


# ReLU.


def published_l1(probs: Tensor, topk: float, coefficient: float) -> Tensor:
    """Return the loss of thu-ml/ReMoE on one rank, switch_load_balancing_loss_func of ReLU's outputs."""
    tokens, experts = probs.shape
    tokens_per_expert = (probs > 0).sum(dim=0)
    return (probs.sum(dim=0) * tokens_per_expert).sum() * (experts * coefficient / (tokens * tokens * topk))


@both_modes
def test_relu_takes_every_positive_score_which_is_its_own_gate(training: bool) -> None:
    rule, scores = ReLU(EXPERTS), make_scores()
    scores[0, 0] = 0
    routing = rule.route(scores, rule.init(), training=training)
    assert torch.equal(routing.assignment, scores > 0)
    assert torch.equal(routing.gates, scores.clamp(min=0))


@pytest.mark.parametrize("fanout", [1, 2.5])
def test_the_loss_of_relu_is_that_of_the_published_code(fanout: float) -> None:
    rule, scores = ReLU(EXPERTS, fanout, l1_start=0.25), make_scores(1).requires_grad_()
    loss = rule.route(scores, rule.init(), training=True).loss
    theirs = published_l1(scores.relu().flatten(0, 1), fanout, 0.25)
    torch.testing.assert_close(loss, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(each, scores)[0] for each in (loss, theirs)))


def test_lambda_moves_as_in_the_published_code_and_rests_at_the_target_and_without_a_rate() -> None:
    rule = ReLU(EXPERTS, 2)
    state, theirs = rule.init(), 1e-8
    for step in range(12):
        routing = rule.route(make_scores(step) + (-1.5 if step % 3 == 0 else 0.3), state, training=True)
        torch.testing.assert_close(rule.describe(state)["lambda"], torch.tensor(theirs), rtol=1e-4, atol=0)
        state = rule.update(state, routing.observation)
        sparsity = 1 - routing.assignment.float().mean().item()
        theirs *= 1.2 if sparsity < 1 - 2 / EXPERTS else 1 / 1.2
    resting = ReLU(EXPERTS, EXPERTS)
    seen = resting.route(make_scores().abs() + 0.1, resting.init(), training=True).observation
    assert resting.update(resting.init(), seen) == resting.init()


def test_the_loss_of_relu_steers_the_fanout_to_the_target() -> None:
    rule = ReLU(EXPERTS, 1, l1_start=1e-3)
    state, bias = rule.init(), torch.zeros(EXPERTS, requires_grad=True)
    fanouts = []
    for step in range(200):
        routing = rule.route(make_scores(step) + bias, state, training=True)
        (gradient,) = torch.autograd.grad(routing.loss - 0.01 * routing.gates.mean(), bias)  # a task that wants more
        bias = (bias - 2 * gradient).detach().requires_grad_()
        state = rule.update(state, routing.observation)
        fanouts.append(float(routing.observation.fanout_mean))
    assert fanouts[0] > 2.5
    assert sum(fanouts[-50:]) / 50 == pytest.approx(1, abs=0.3)


def test_a_short_run_starts_with_a_larger_lambda_and_the_published_length_with_the_published_one() -> None:
    assert scaled_rule("relu", 60_000) == ReLU()
    assert scaled_rule("relu", 60_000_000) == ReLU()  # 1.2^6000000 is no float
    short = scaled_rule("relu", 300)
    assert short.l1_start * 1.2**30 == pytest.approx(0.001, rel=0.01)
    assert scaled_rule("relu", 300, l1_start=1e-8) == ReLU()


# Top-p.


def published_top_p(shares: Tensor, p: float) -> Tensor:
    """Return the weights (tokens, experts) of ZhenweiAn/Dynamic_MoE, which are 0 for experts that are not taken."""
    ordered, order = torch.sort(shares, descending=True)
    beyond = ordered.cumsum(-1) > p
    first = torch.nn.functional.one_hot(beyond.long().argmax(-1), shares.shape[-1]).bool()
    return torch.zeros_like(shares).scatter(1, order, torch.where(beyond & ~first, 0.0, ordered))


@both_modes
@pytest.mark.parametrize("p", [0.05, 0.4, 0.7, 0.95])
def test_experts_and_gates_of_top_p_are_those_of_the_published_code(p: float, training: bool) -> None:
    rule, scores = TopP(EXPERTS, p=p), make_scores(1, spread=1.5)
    routing = rule.route(scores, rule.init(), training=training)
    theirs = published_top_p(scores.flatten(0, 1).softmax(-1), p)
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
    rule = TopP(4, 2, p="steered", p_rate=0.1)
    state = rule.init()
    one = rule.route(torch.tensor([[[9.0, 0, 0, 0]]]), state, training=True).observation  # one expert: e = 1/4
    state = rule.update(state, one)
    torch.testing.assert_close(state.p, torch.tensor(0.4 + 0.1 * 0.25 + 0.1 * 0.25))
    state = rule.update(state, one)  # the error is the same: only the integral moves p further
    torch.testing.assert_close(state.p, torch.tensor(0.45 + 0.1 * 0.25))


def test_gains_of_a_short_run_are_larger_and_never_wild() -> None:
    rates = [rule.p_rate for steps in (1, 100, 10_000) if isinstance(rule := scaled_rule("top_p", steps), TopP)]
    assert rates == [0.2, 0.1, 0.02]


# Sequence top-k.


def best_pairs(values: Tensor, tokens: int, rule: SeqTopK) -> set[tuple[int, int]]:
    """Return the pairs that the first `tokens` tokens of values (time, experts) take, selected one by one."""
    pairs = itertools.product(range(tokens), range(EXPERTS))
    budget, most = int(tokens * Fraction(str(rule.experts_per_token))), rule.max_per_token or EXPERTS
    taken: list[tuple[int, int]] = []
    for pair in sorted(pairs, key=lambda pair: (-values[pair].item(), pair)):
        if len(taken) < budget and sum(token == pair[0] for token, _ in taken) < most:
            taken.append(pair)
    return set(taken)


@pytest.mark.parametrize("rule", SeqTopK.cases().values(), ids=SeqTopK.cases())
@both_modes
def test_a_sequence_takes_its_best_pairs_and_inference_those_of_tokens_so_far(rule: SeqTopK, training: bool) -> None:
    scores = make_scores(width=rule.num_scores).mul(4).round().div(4)
    time = scores.shape[1]
    taken = rule.route(scores, rule.init(), training=training).assignment
    for row, assigned in zip(scores, taken, strict=True):
        values = (row.softmax(-1) if rule.gate == "softmax" else row)[:, :EXPERTS]
        if training:
            wanted = best_pairs(values, time, rule)
        else:
            wanted = {pair for t in range(time) for pair in best_pairs(values, t + 1, rule) if pair[0] == t}
        assert {(t, i) for t, i in assigned.nonzero().tolist()} == wanted


def test_long_sequences_get_their_budget_whatever_its_decimal_form() -> None:
    rule, scores = SeqTopK(EXPERTS, 4 / 3), torch.randn(1, 2048, EXPERTS)
    fanouts = [rule.route(scores, rule.init(), training=mode).observation.fanout_mean for mode in (True, False)]
    assert fanouts == [pytest.approx(4 / 3, abs=0.001), pytest.approx(4 / 3, rel=0.1)]
    with pytest.raises(ValueError, match=r"k = ⌊2 · 0\.4⌋ = 0.*larger experts_per_token"):
        SeqTopK(EXPERTS, 0.4).route(scores[:, :2], rule.init(), training=True)


@pytest.mark.parametrize("gate", ["sigmoid", "softmax", "softmax_chosen", "sigmoid_normalised"])
def test_a_token_without_experts_spreads_no_nan(gate: Any) -> None:
    rule, scores = SeqTopK(EXPERTS, 0.5, gate=gate), make_scores().requires_grad_()
    routing = rule.route(scores, rule.init(), training=True)
    assert (routing.assignment.sum(-1) == 0).any()
    (gradient,) = torch.autograd.grad((routing.gates * routing.assignment).sum(), scores)
    assert gradient.isfinite().all()


# Null slots.

NULL, SLOTS = 4, 3


def null_slots(null: Literal["zero", "copy"] = "zero", fanout: float = 1.5, **options: float) -> NullSlots:
    sizes: dict[str, Any] = {"null_slots": NULL, "slots_per_token": SLOTS}
    return NullSlots(EXPERTS, fanout, null=null, **sizes, **options)


@both_modes
def test_slots_and_gates_are_those_of_the_published_router(training: bool) -> None:
    models = pytest.importorskip("transformers.models.longcat_flash.modeling_longcat_flash")
    config = SimpleNamespace(
        hidden_size=EXPERTS + NULL, num_experts_per_tok=SLOTS, num_local_experts=EXPERTS, n_routed_experts=EXPERTS,
        zero_expert_num=NULL, routed_scaling_factor=2.5,
    )  # fmt: skip
    router = models.LongcatFlashTopkRouter(config)
    bias = torch.randn(EXPERTS + NULL, generator=torch.Generator().manual_seed(9)) / 20
    router.e_score_correction_bias.copy_(bias)
    torch.nn.init.eye_(router.classifier.weight)
    scores = make_scores(width=EXPERTS + NULL)
    routing = null_slots("copy", gate_scale=2.5).route(scores, NullSlotState(bias), training=training)
    _, weights, chosen = router(scores)
    theirs = torch.zeros(chosen.shape[0], EXPERTS + NULL).scatter(1, chosen, weights).view_as(scores)
    assert torch.equal(routing.assignment, theirs[..., :EXPERTS] > 0)
    torch.testing.assert_close(routing.gates * routing.assignment, theirs[..., :EXPERTS])
    torch.testing.assert_close(routing.passthrough, theirs[..., EXPERTS:].sum(-1))
    assert int(routing.observation.null_load.sum()) == int((theirs[..., EXPERTS:] > 0).sum())


def test_a_layer_adds_copies_of_the_token_and_nothing_for_zeros() -> None:
    torch.manual_seed(0)
    zero, copy = (MoE(8, 12, null_slots(null), shared_experts=0) for null in ("zero", "copy"))  # type: ignore[arg-type]
    copy.load_state_dict(zero.state_dict())
    x = torch.randn(2, 5, 8)
    passthrough = copy.router(x).passthrough
    assert zero.router(x).passthrough is None
    y, _ = copy(x)
    torch.testing.assert_close(y, zero(x)[0] + passthrough[..., None] * x)
    (gradient,) = torch.autograd.grad(y.sum(), copy.router.weight)
    assert gradient[EXPERTS:].any(1).all()  # the slots' own rows learn


# Controllers and biases: each rule with the spread of its scores, and a bound on the largest load over the mean.
STEERED: dict[str, tuple[Rule, float, float]] = {
    **{
        f"top-p, fanout {fanout}, spread {spread}": (TopP(EXPERTS, fanout, p="steered"), spread, EXPERTS)
        for fanout in (1.5, 2.5, 4)
        for spread in (0.3, 3.0)
    },
    **{f"nulls, fanout {fanout}": (null_slots(fanout=fanout, bias_rate=0.002), 1, 1.3) for fanout in (0.5, 1, 2.5)},
    "biases by sign": (TokenChoice(EXPERTS, balance="loss_free", bias_rate=0.02), 1, 1.3),
    "biases in proportion": (TokenChoice(EXPERTS, balance="loss_free_proportional", bias_rate=0.02), 1, 1.3),
}


@pytest.mark.parametrize(("rule", "spread", "largest"), STEERED.values(), ids=STEERED)
def test_controllers_reach_their_fanout_and_biases_balance_the_loads(rule: Rule, spread: float, largest: float) -> None:
    state, popular = rule.init(), torch.linspace(-1, 1, rule.num_scores) * (largest < EXPERTS)
    fanouts, loads = [], []
    for step in range(500):
        scores = make_scores(step, spread=spread, width=rule.num_scores) + popular
        seen = rule.route(scores, state, training=True).observation
        fanouts.append(float(seen.fanout_mean))
        loads.append(seen.load)
        state = rule.update(state, seen)
    assert sum(fanouts[-100:]) / 100 == pytest.approx(rule.experts_per_token, rel=0.05)
    load = torch.stack(loads[-100:]).float().mean(0)
    assert load.max() / load.mean() < largest
    if isinstance(rule, NullSlots):
        share = float(rule.measure(state, seen)["null_share"])
        assert share == pytest.approx(1 - fanouts[-1] / SLOTS, abs=1e-6)

"""Gates equal their definitions and the gates of published models."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from expert_threshold.routing import (
    BiasState,
    ExpertChoice,
    ExpertThreshold,
    QuantileBalancing,
    Rule,
    SeqTopK,
    TokenChoice,
    observe,
)
from expert_threshold.routing.gates import Gate
from expert_threshold.routing.token_choice import Balance

EXPERTS, FANOUT = 8, 3


def make_scores(seed: int = 0) -> Tensor:
    return torch.randn(2, 16, EXPERTS, generator=torch.Generator().manual_seed(seed)) * 2


def by_hand(gate: Gate, scores: list[float], chosen: list[int]) -> dict[int, float]:
    """The gate of each chosen expert of one token."""
    weights = [1 / (1 + math.exp(-r)) if gate.startswith("sigmoid") else math.exp(r) for r in scores]
    whole = {"sigmoid": 1.0, "softmax": sum(weights)}.get(gate, sum(weights[expert] for expert in chosen))
    return {expert: weights[expert] / whole for expert in chosen}


@pytest.mark.parametrize("gate", get_args(Gate))
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_gates_are_those_of_the_definition(gate: Gate, scale: float) -> None:
    rule, scores = TokenChoice(EXPERTS, FANOUT, gate=gate, gate_scale=scale), make_scores()
    routing = rule.route(scores, rule.init(), training=True)
    tokens = zip(scores.flatten(0, 1), routing.assignment.flatten(0, 1), routing.gates.flatten(0, 1), strict=True)
    for row, assigned, gates in tokens:
        for expert, expected in by_hand(gate, row.tolist(), assigned.nonzero().flatten().tolist()).items():
            assert gates[expert].item() == pytest.approx(scale * expected, rel=1e-5)


ROUTERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "MixtralTopKRouter": ("mixtral", {}, {"gate": "softmax_chosen"}),
    "OlmoeTopKRouter": ("olmoe", {"norm_topk_prob": False}, {"gate": "softmax"}),
    "Qwen3MoeTopKRouter": ("qwen3_moe", {"norm_topk_prob": True}, {"gate": "softmax_chosen"}),
    "DeepseekV3TopkRouter": (
        "deepseek_v3",
        {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2},
        {"gate": "sigmoid_normalised", "gate_scale": 2.5, "over": "gates", "num_groups": 4, "groups_per_token": 2},
    ),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_gates_and_experts_are_those_of_transformers_own_routers(name: str) -> None:
    module, its_options, options = ROUTERS[name]
    models = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    if not hasattr(models, name):
        pytest.skip(f"this transformers has no {name}")
    sizes = {"num_experts_per_tok": FANOUT, "num_experts": EXPERTS, "num_local_experts": EXPERTS}
    config = SimpleNamespace(hidden_size=EXPERTS, n_routed_experts=EXPERTS, **sizes, **its_options)
    router = getattr(models, name)(config)
    with torch.no_grad():
        router.weight.copy_(torch.eye(EXPERTS))  # scores are the hidden states themselves
    scores, bias = make_scores(1), torch.zeros(EXPERTS)
    if options.get("over") == "gates":  # a quarter of the tokens change their experts
        bias = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(2)) / 10
        router.e_score_correction_bias.copy_(bias)
    _, weights, chosen = router(scores.clone())
    theirs = torch.zeros(scores.flatten(0, 1).shape).scatter(1, chosen, weights.detach())
    rule = TokenChoice(EXPERTS, FANOUT, **options)
    routing = rule.route(scores, BiasState(bias), training=False)
    assert torch.equal(routing.assignment.flatten(0, 1), theirs > 0)
    torch.testing.assert_close((routing.gates * routing.assignment).flatten(0, 1), theirs)


@pytest.mark.parametrize("gate", ["softmax_chosen", "sigmoid_normalised"])
def test_normalised_gates_sum_to_their_scale_however_small_the_scores(gate: Gate) -> None:
    rule, scores = TokenChoice(EXPERTS, FANOUT, gate=gate, gate_scale=2.0), (make_scores() - 200).requires_grad_()
    routing = rule.route(scores, rule.init(), training=True)
    taken = (routing.gates * routing.assignment).sum(-1)
    torch.testing.assert_close(taken, torch.full_like(taken, 2.0))
    (gradient,) = torch.autograd.grad(routing.gates[..., 0].sum(), scores)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("gate", get_args(Gate))
def test_the_auxiliary_loss_and_its_gradient_come_from_the_mean_gate_without_the_scale(gate: Gate) -> None:
    rule = TokenChoice(EXPERTS, FANOUT, balance="aux", aux_strength=0.5, gate=gate, gate_scale=3.0)
    scores = make_scores().requires_grad_()
    routing = rule.route(scores, rule.init(), training=True)
    load = routing.assignment.float().flatten(0, 1).mean(0) * EXPERTS / FANOUT
    weights = scores.sigmoid() if gate.startswith("sigmoid") else scores.exp()
    shares = weights if gate == "sigmoid" else weights / weights.sum(-1, keepdim=True)
    expected = 0.5 * (load * shares.flatten(0, 1).mean(0)).sum()
    torch.testing.assert_close(routing.loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, scores)[0] for loss in (routing.loss, expected)))


@pytest.mark.parametrize(
    ("balance", "expected"),
    # Loads 5, 4, 3, 0 over a mean of 3, in two micro-batches: f = 5/3, 4/3, 1, 0.
    [("loss_free", [-1, -1, 0, 1]), ("loss_free_proportional", [-2 / 3, -1 / 3, 0, 1]), ("aux", [0, 0, 0, 0])],
)
def test_biases_move_against_the_summed_load_by_its_sign_or_in_proportion(balance: Any, expected: list[float]) -> None:
    chosen = torch.nn.functional.one_hot(torch.repeat_interleave(torch.tensor([5, 4, 3, 0])), 4).bool()
    first, second = (observe(torch.zeros(part.shape), part) for part in chosen[None].split(7, 1))
    rule, bias = TokenChoice(4, balance=balance, bias_rate=0.1), torch.tensor([1.0, 2.0, 3.0, 4.0])
    moved = rule.update(BiasState(bias), first + second).bias
    torch.testing.assert_close(moved, bias + 0.1 * torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.25, 8.0])
@pytest.mark.parametrize("balance", ["aux", "loss_free"])
def test_beyond_its_capacity_an_expert_drops_the_smallest_gates_in_training(balance: Balance, factor: float) -> None:
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
    lost = (chosen & ~expected).sum(0) / chosen.sum(0).clamp(min=1)
    assert torch.allclose(bounded.measure(plain.init(), kept.observation)["dropped"], lost)
    assert kept.observation.raw_load.tolist() == chosen.sum(0).tolist()
    if balance == "aux":
        assert torch.equal(kept.loss, everything.loss)  # type: ignore[arg-type]
    moved = [rule.update(plain.init(), routing.observation) for rule, routing in ((plain, everything), (bounded, kept))]
    assert torch.equal(moved[0].bias, moved[1].bias)
    assert torch.equal(bounded.route(scores, plain.init(), training=False).assignment, everything.assignment)


def test_kernels_are_offered_only_plain_sigmoid_gates_and_labels_name_the_others() -> None:
    rules = [TokenChoice(EXPERTS, FANOUT, gate=gate) for gate in get_args(Gate)]
    assert [rule.sigmoid_gates for rule in rules] == [True, False, False, False]
    assert [rule.label for rule in rules] == ["TC", "TC softmax", "TC softmax chosen", "TC sigmoid norm."]
    scaled = TokenChoice(EXPERTS, balance="loss_free", gate_scale=2.5)
    assert (scaled.sigmoid_gates, scaled.label) == (False, "TC loss-free ×2.5")


def scores_with_nulls() -> tuple[Tensor, Tensor]:
    """Return experts' scores, and the same scores followed by three null scores."""
    return make_scores(), torch.cat([make_scores(), make_scores(5)[..., :3]], -1)


@pytest.mark.parametrize("kind", [ExpertThreshold, ExpertChoice, TokenChoice, QuantileBalancing])
@pytest.mark.parametrize("training", [True, False])
def test_null_scores_lower_softmax_gates_and_decide_nothing(kind: type[Rule], training: bool) -> None:
    own, scores = scores_with_nulls()
    rule, without = kind(EXPERTS, 2, gate="softmax", null_scores=3), kind(EXPERTS, 2)
    state = without.update(without.init(), without.route(make_scores(1), without.init(), training=True).observation)
    routing, expected = rule.route(scores, state, training=training), without.route(own, state, training=training)
    assert torch.equal(routing.assignment, expected.assignment)
    torch.testing.assert_close(routing.gates, own.exp() / scores.exp().sum(-1, keepdim=True))
    assert torch.equal(expected.gates, own.sigmoid())
    assert torch.equal(routing.observation.score_sum, expected.observation.score_sum)
    assert torch.equal(rule.update(state, routing.observation)[0], without.update(state, expected.observation)[0])


def test_pairs_of_a_sequence_are_compared_by_their_shares_of_all_scores() -> None:
    own, scores = scores_with_nulls()
    rule = SeqTopK(EXPERTS, 2, gate="softmax", null_scores=3)
    routing = rule.route(scores, rule.init(), training=True)
    shares = own.exp() / scores.exp().sum(-1, keepdim=True)
    torch.testing.assert_close(routing.gates, shares)
    order = shares.flatten(1).argsort(1, descending=True)[:, : 2 * scores.shape[1]]
    expected = torch.zeros(2, own[0].numel(), dtype=torch.bool).scatter(1, order, True)
    assert torch.equal(routing.assignment.flatten(1), expected)


def test_null_scores_do_not_enter_the_loss_and_enter_values_over_gates() -> None:
    own, scores = scores_with_nulls()
    rule, without = (TokenChoice(EXPERTS, 2, balance="aux", gate="softmax", null_scores=n) for n in (3, 0))
    loss, expected = (r.route(s, r.init(), training=True).loss for r, s in ((rule, scores), (without, own)))
    torch.testing.assert_close(loss, expected)
    bias = BiasState(torch.linspace(0, 0.5, EXPERTS))
    over = TokenChoice(EXPERTS, 1, balance="loss_free", gate="softmax", over="gates", null_scores=3)
    shares = scores.softmax(-1)[..., :EXPERTS]
    assignment = over.route(scores, bias, training=True).assignment
    assert torch.equal(assignment.int().argmax(-1), (shares + bias.bias).argmax(-1))


def test_a_state_continues_where_its_units_are_the_same() -> None:
    def rule(**options: Any) -> TokenChoice:
        return TokenChoice(4, 2, balance="loss_free", **options)

    gates = rule(over="gates")
    assert rule().can_start_from(rule(gate="softmax", null_scores=2))  # over scores, whatever the gates
    assert gates.can_start_from(rule(over="gates", gate="sigmoid_normalised"))  # of the same sigmoids
    assert not gates.can_start_from(rule())
    assert not gates.can_start_from(rule(over="gates", gate="softmax"))
    softmax = rule(over="gates", gate="softmax")
    assert softmax.can_start_from(rule(over="gates", gate="softmax_chosen"))
    assert not softmax.can_start_from(rule(over="gates", gate="softmax", null_scores=2))
    assert ExpertThreshold(4).can_start_from(ExpertChoice(4))
    assert not ExpertThreshold(4).can_start_from(QuantileBalancing(4))

"""Sequence top-k: by its definition, and its causal inference."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from expert_threshold.routing import SeqTopK
from expert_threshold.routing.seq_top_k import kth_of_prefixes

EXPERTS = 6


def make_scores(seed: int = 0, batch: int = 2, time: int = 19, grain: float = 1 / 4) -> Tensor:
    scores = torch.randn(batch, time, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return scores.div(grain).round().mul(grain)


def best_pairs(values: Tensor, tokens: int, rule: SeqTopK) -> set[tuple[int, int]]:
    """The pairs that the first `tokens` of a sequence's values (time, experts) take together, one after another."""
    pairs = sorted(
        ((t, i) for t in range(tokens) for i in range(EXPERTS)), key=lambda pair: (-values[pair].item(), pair)
    )
    budget, most = int(tokens * Fraction(str(rule.experts_per_token))), rule.max_per_token or EXPERTS
    taken: list[tuple[int, int]] = []
    for pair in pairs:
        if len(taken) < budget and sum(token == pair[0] for token, _ in taken) < most:
            taken.append(pair)
    return set(taken)


RULES = {
    "one": SeqTopK(EXPERTS, 1),
    "a fraction": SeqTopK(EXPERTS, 1.3),
    "less than one": SeqTopK(EXPERTS, 0.3),
    "at most three": SeqTopK(EXPERTS, 2, max_per_token=3),
    "shares": SeqTopK(EXPERTS, 2, gate="softmax"),
    "capped shares": SeqTopK(EXPERTS, 1.5, gate="softmax", max_per_token=2),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("training", [True, False])
def test_a_sequence_takes_its_best_pairs_and_inference_those_of_the_tokens_so_far(
    rule: SeqTopK, training: bool
) -> None:
    scores = make_scores()
    time = scores.shape[1]
    taken = rule.route(scores, rule.init(), training=training).assignment
    for row, assigned in zip(scores, taken, strict=True):
        values = row.softmax(-1) if rule.gate == "softmax" else row
        if training:
            wanted = best_pairs(values, time, rule)
        else:
            wanted = {pair for t in range(time) for pair in best_pairs(values, t + 1, rule) if pair[0] == t}
        assert {(t, i) for t, i in assigned.nonzero().tolist()} == wanted


@pytest.mark.parametrize("experts_per_token", [0.5, 1, 1.7, 3])
def test_a_sequence_uses_its_budget_to_the_pair_in_training(experts_per_token: float) -> None:
    rule, scores = SeqTopK(EXPERTS, experts_per_token), make_scores(time=21)
    taken = rule.route(scores, rule.init(), training=True).assignment
    assert (taken.sum((1, 2)) == int(21 * Fraction(str(experts_per_token)))).all()


def test_the_mean_fanout_of_inference_is_that_of_training_where_scores_do_not_drift() -> None:
    rule, scores = SeqTopK(EXPERTS, 1.5), make_scores(batch=32, time=64, grain=1e-6)
    seen = rule.route(scores, rule.init(), training=False).observation
    assert float(seen.fanout_mean) == pytest.approx(1.5, rel=0.03)


def test_some_tokens_take_more_than_others_up_to_the_cap() -> None:
    scores = make_scores(grain=1e-6)
    free, capped = (SeqTopK(EXPERTS, 2, max_per_token=most) for most in (None, 3))
    fanouts = [rule.route(scores, rule.init(), training=True).assignment.sum(-1) for rule in (free, capped)]
    assert fanouts[0].min() < 2
    assert fanouts[0].max() > 3
    assert fanouts[1].max() == 3


@pytest.mark.parametrize("gate", ["sigmoid", "softmax", "softmax_chosen", "sigmoid_normalised"])
def test_a_token_without_experts_spreads_no_nan(gate: Any) -> None:
    rule, scores = SeqTopK(EXPERTS, 0.5, gate=gate), make_scores().requires_grad_()
    routing = rule.route(scores, rule.init(), training=True)
    assert (routing.assignment.sum(-1) == 0).any()
    (gradient,) = torch.autograd.grad((routing.gates * routing.assignment).sum(), scores)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("width", [1, 5, 8])
def test_a_wavelet_matrix_finds_the_kth_of_every_prefix(width: int) -> None:
    times, generator = 33, torch.Generator().manual_seed(width)
    ranks = torch.stack([torch.randperm(width * times, generator=generator) for _ in range(3)])
    ks = torch.tensor([int(t * generator.initial_seed() * 0.37) % (t * width + 1) for t in range(1, times + 1)])
    found = kth_of_prefixes(ranks, width, ks)
    for row, kth in zip(ranks, found, strict=True):
        for t, k in enumerate(ks.tolist()):
            expected = row[: (t + 1) * width].sort().values[k - 1] if k else -1
            assert kth[t] == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_per_token": 0},
            "max_per_token=0 must be a whole number of at least 1 or none",
        ),
        ({"max_per_token": 17}, "max_per_token=17 must"),
        ({"max_per_token": 1.5}, "max_per_token=1.5 must"),
        (
            {"experts_per_token": 2, "max_per_token": 1},
            "max_per_token=1 must be above experts_per_token=2, which is token_choice",
        ),
        ({"gate": "relu"}, "gate='relu' must be sigmoid, softmax"),
        ({"gate_scale": 0}, "gate_scale=0 must be a number above 0"),
    ],
)
def test_nonsense_is_refused_with_option_value_and_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SeqTopK(**options)

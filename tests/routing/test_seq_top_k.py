"""Sequence top-k: by its definition, and its causal inference."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from expert_threshold.routing import SeqTopK

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


@pytest.mark.parametrize("gate", ["sigmoid", "softmax", "softmax_chosen", "sigmoid_normalised"])
def test_a_token_without_experts_spreads_no_nan(gate: Any) -> None:
    rule, scores = SeqTopK(EXPERTS, 0.5, gate=gate), make_scores().requires_grad_()
    routing = rule.route(scores, rule.init(), training=True)
    assert (routing.assignment.sum(-1) == 0).any()
    (gradient,) = torch.autograd.grad((routing.gates * routing.assignment).sum(), scores)
    assert gradient.isfinite().all()

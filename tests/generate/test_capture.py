"""Routing capture: what was routed where while generating, and its replay in training."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from cases import NULL_SCORES, RULES, small_model, small_tokenizer
from expert_threshold.generate import Generated, Request, generate_captured
from expert_threshold.model import GPT
from expert_threshold.moe import decide, replay, routing_version
from expert_threshold.routing import ExpertThreshold, Rule, TokenChoice

THRESHOLD = ExpertThreshold(5, 2, warmup_steps=2)  # five experts: a remainder of vector instructions


def generated(model: GPT, rate: float | None = None) -> list[Generated]:
    prompts = [(269, 5, 7), (269, 1), (269, *range(40)), (269, 9)]
    requests = [Request(ids, 12, seed=i, rate=rate) for i, ids in enumerate(prompts)]
    return generate_captured(model, small_tokenizer(), requests, slots=3)


CHOSEN = replace(THRESHOLD, gate="softmax_chosen", gate_scale=2.5)
LOSS_FREE = TokenChoice(5, 2, balance="loss_free")
DIALLED = [THRESHOLD, replace(THRESHOLD, gate="softmax"), CHOSEN, RULES["expert_choice"]]


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize(("rule", "rate"), [*product(DIALLED, [None, 1.5]), (LOSS_FREE, None)])
def test_ids_and_gates_follow_to_the_last_bit_from_scores_and_thresholds(rule: Rule, rate: float | None) -> None:
    model = small_model(rule)
    found = generated(model, rate=rate)
    for _, capture in found:
        assignment, gates = decide(model, capture, rate)
        assert torch.equal(assignment, capture.assignment)
        assert torch.equal(gates, capture.gates)
        assert capture.scores.shape == (2, len(capture.tokens), rule.num_experts)
    assert len({capture.version for _, capture in found}) == 1


@pytest.mark.parametrize("dispatch", ["reference", "grouped", "static"])
def test_training_replays_what_was_routed_whatever_the_weights_are_by_then(dispatch: str) -> None:
    rule = replace(THRESHOLD, capacity_slack=0.1, gate="softmax_chosen")
    model = small_model(rule, dispatch=dispatch)
    captures = [capture for _, capture in generated(model)]
    longest = max(len(capture.tokens) for capture in captures)
    tokens = torch.stack([torch.nn.functional.pad(c.tokens, (0, longest - len(c.tokens))) for c in captures])
    for _, moe in model.moe_layers():
        moe.router.weight.data.mul_(-1)  # by itself it would route otherwise
        moe.router.weight.grad = None
    model.train()
    with replay(model, captures):
        output = model(tokens, tokens, record=True)
    output.loss.backward()
    for layer, routing in enumerate(output.routings):
        gates = (routing.gates * routing.assignment).sum(-1)
        torch.testing.assert_close(gates, routing.assignment.any(-1).float())  # normalised over the captured experts
        for row, capture in enumerate(captures):
            length = len(capture.tokens)
            assert torch.equal(routing.assignment[row, :length], capture.assignment[layer])
            assert not routing.assignment[row, length:].any()
    for _, moe in model.moe_layers():
        assert moe.router.rule == rule
        assert moe.router.weight.grad.abs().sum() > 0
        assert model(tokens).observations[0].load.sum() > 0


@pytest.mark.parametrize("rate", [None, 1.5])
def test_a_replay_with_the_same_weights_is_the_model_itself(rate: float | None) -> None:
    model = small_model(THRESHOLD)
    model.set_rate(rate)
    (found, *_) = generated(model)
    with torch.no_grad():
        own = model(found.capture.tokens[None]).logits
        with replay(model, [found.capture]):
            torch.testing.assert_close(model(found.capture.tokens[None]).logits, own)
            torch.testing.assert_close(model(found.capture.tokens[None, :-1]).logits, own[:, :-1])


def test_a_capture_that_does_not_fit_is_refused() -> None:
    model, nulls = small_model(THRESHOLD), small_model(NULL_SCORES)
    (found, *_) = generated(model)
    version = routing_version(model)
    with pytest.raises(ValueError, match="tokens, but its captures"), replay(model, [found.capture]):
        model(found.capture.tokens.repeat(1, 2))
    model.moe_layers()[0][1].router.state.mean[0] += 1
    assert routing_version(model) != version
    with pytest.raises(ValueError, match="other thresholds"):
        decide(model, found.capture)
    with pytest.raises(ValueError, match="more than a token's own expert scores"):
        decide(nulls, generated(nulls)[0].capture)

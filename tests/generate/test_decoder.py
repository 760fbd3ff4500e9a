"""The decoder equals the model's full forward, whatever else is in the batch."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator
from dataclasses import fields
from itertools import product
from typing import Any, get_args, get_type_hints

import pytest
import torch
import torch.nn.functional as F

from cases import PIECES, RULES, covering, small_model
from expert_threshold.generate import decoder
from expert_threshold.generate.decoder import Decoder
from expert_threshold.model import GPT, GPTConfig
from expert_threshold.moe import follow
from expert_threshold.routing import RULES as REGISTERED
from expert_threshold.routing import Rule
from rounding import assert_rounded

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
MODES, WAYS = ("fast", "strict"), ("operations", "kernel")
both_ways = pytest.mark.usefixtures("by")

# A value for each of the model's options that is neither a switch nor a choice; sizes that fill no vector.
VALUES: dict[str, Any] = {
    "vocab_size": 271, "context": 48, "layers": 3, "d_model": 44, "heads": 1, "kv_heads": 1, "d_expert": 19,
    "d_feed_forward": 51, "shared_experts": 2, "dense_layers": 0, "z_loss": 0.1, "qk_scale": 1.2,
    "rotary_base": 100_000.0, "windows": "SSL", "short_window": 3, "dispatch": "reference",
}  # fmt: skip
NEEDED: dict[str, dict[str, Any]] = {"heads": {"kv_heads": 1}, "short_window": {"windows": "SL"}}
ODD = {name: VALUES[name] for name in ("vocab_size", "d_model", "kv_heads", "d_expert", "d_feed_forward")}
SWIGLU = ODD | {"activation": "swiglu", "shared_experts": 0}


def options() -> Iterator[tuple[str, Rule | None, dict[str, Any]]]:
    """Yield each option of GPTConfig with each of its values, and each case of each rule; then some together."""
    usual, hints = RULES["expert_threshold"], get_type_hints(GPTConfig)
    for field in {field.name for field in fields(GPTConfig)} - {"rule"}:
        choices = [value for part in (hints[field], *get_args(hints[field])) for value in get_args(part)]
        choices = [True] if hints[field] is bool else [value for value in choices if isinstance(value, str)]
        for value in [VALUES[field]] if field in VALUES or not choices else choices:  # fails for a new option
            yield f"{field}={value}", usual, NEEDED.get(field, {}) | {field: value}
    for name, cls in REGISTERED.items():
        yield from ((f"{name}, {case}", rule, {"gate_norm": "fanout"}) for case, rule in cls.cases().items())
    for name, rule in RULES.items():
        yield f"{name}, trunk", rule, ODD | PIECES["all of them"]
        yield f"{name}, swiglu", rule, SWIGLU


CASES = {name: (rule, changes) for name, rule, changes in sorted(options(), key=operator.itemgetter(0))}


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(270), k=length)


@torch.no_grad()
def full(model: GPT, tokens: list[int]) -> Any:
    return model(torch.tensor([tokens]), record=True)


@both_ways
@pytest.mark.parametrize(("rule", "changes"), CASES.values(), ids=CASES)
def test_logits_and_routing_of_a_sequence_equal_the_full_forward(
    rule: Rule | None, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers `GPT.forward` with a cache and the kernel, for every option of the model."""
    monkeypatch.setattr(decoder, "PREFILL", 16)
    by_number = isinstance(getattr(rule, "pool", None), int)  # only used in training, and fits no batch here
    model = small_model(rule, **({"layers": 2, "steps": 0 if by_number else 2} | changes))
    for _, moe in model.moe_layers():
        if "bias" in moe.router.state._fields:
            moe.router.state.bias.normal_()
    tokens, decoded = tokens_of(30), Decoder(model, 3, 48, strict=rule is RULES["token_choice"])
    decoded.open(1)
    outputs = [decoded.read(1, piece, every=True) for piece in (tokens[:16], tokens[16:19], tokens[19:20])]
    outputs += [decoded.step({1: token}) for token in tokens[20:]]
    expected = full(model, tokens)
    logits = torch.cat([o.logits for o in outputs])
    torch.testing.assert_close(logits, expected.logits[0], **CLOSE)
    for i, (likeliest, highest, logsumexp) in enumerate(stats for o in outputs for stats in o.peaks):
        assert (likeliest, highest) == (int(logits[i].argmax()), float(logits[i].max()))
        assert logsumexp == pytest.approx(float(logits[i].double().logsumexp(-1)), abs=1e-5)
    for layer, routing in enumerate(expected.routings):
        scores, assignment = (torch.cat([getattr(o, n)[layer] for o in outputs]) for n in ("scores", "assignment"))
        torch.testing.assert_close(scores, routing.scores[0], **CLOSE)
        assert torch.equal(assignment, routing.assignment[0, :, : assignment.shape[1]])
        if outputs[-1].gates is not None:
            gates = torch.cat([o.gates[layer] for o in outputs if o.gates is not None])
            expected_gates = (routing.gates[0] * routing.assignment[0])[:, : gates.shape[1]]
            torch.testing.assert_close(gates * assignment, expected_gates)
    assert sum(o.assigned for o in outputs) == sum(int(o.assignment.sum()) for o in outputs)


@pytest.mark.parametrize(("rule", "mode", "by"), covering(product(RULES, MODES, WAYS)), indirect=["by"])
def test_sequences_of_any_lengths_join_and_leave_and_rows_are_used_again(rule: str, mode: str, by: None) -> None:
    model, chance = small_model(RULES[rule]), random.Random(0)
    decoded = Decoder(model, 4, 40, strict=mode == "strict")
    texts: dict[int, list[int]] = {}
    said: dict[int, list[torch.Tensor]] = {}

    def require_the_full_forward(row: int) -> None:
        text, logits = texts.pop(row), torch.stack(said.pop(row))
        torch.testing.assert_close(logits, full(model, text).logits[0, -len(logits) :], **CLOSE)

    for _ in range(30):
        row = chance.randrange(4)
        if row in texts and (chance.random() < 0.3 or len(texts[row]) > 30):
            decoded.close(row)
            assert decoded.cache.lengths[row] == 0
            require_the_full_forward(row)
        elif row not in texts:
            texts[row] = chance.choices(range(270), k=chance.randint(1, 12))
            decoded.open(row)
            said[row] = [decoded.read(row, texts[row]).logits[-1]]
        rows = [row for row in texts if chance.random() < 0.8]  # the others wait
        if rows:
            for row in rows:
                texts[row].append(chance.randrange(270))
            logits = decoded.step({row: texts[row][-1] for row in rows}).logits
            for row, of_row in zip(sorted(rows), logits, strict=True):
                said[row].append(of_row)
            assert [decoded.cache.lengths[row] for row in texts] == [len(text) for text in texts.values()]
    for row in list(texts):
        require_the_full_forward(row)


@both_ways
@torch.no_grad()
def test_in_bfloat16_it_is_within_its_rounding_of_float32_as_the_full_forward_is() -> None:
    model, tokens = small_model(None), tokens_of(40)
    expected = model(torch.tensor([tokens])).logits[0]
    model.compute_dtype = torch.bfloat16
    decoded = Decoder(model, 1, 40)
    parts = [decoded.read(0, tokens[:30], every=True), *(decoded.step({0: t}) for t in tokens[30:])]
    logits = torch.cat([part.logits for part in parts])
    assert_rounded(logits, expected, 4)  # two in each of two layers
    assert_rounded(model(torch.tensor([tokens])).logits[0], expected, 4)


@both_ways
def test_a_row_holds_no_more_than_its_capacity() -> None:
    decoded = Decoder(small_model(), 1, 4)
    decoded.open(0)
    with pytest.raises(ValueError, match="5 tokens do not fit in a cache row of 4"):
        decoded.read(0, [1] * 5)
    decoded.read(0, [1] * 4)
    with pytest.raises(ValueError, match="5 tokens do not fit in a cache row of 4"):
        decoded.step({0: 1})


@torch.no_grad()
@pytest.mark.parametrize("adapted", ["a hook", "a hook of a router", "a subclass", "a parametrization"])
def test_adapters_and_hooks_act_while_decoding(adapted: str) -> None:
    """Regression: decoders copied only the weights, so adapters were silently ignored."""
    model = small_model(RULES["expert_threshold"])
    before, value = full(model, tokens_of(20)).logits, model.blocks[1].attention.value
    match adapted:
        case "a hook":
            model.blocks[0].register_forward_pre_hook(lambda _, inputs: (2 * inputs[0] + 1, *inputs[1:]))
        case "a hook of a router":
            router = model.moe_layers()[0][1].router
            router.register_forward_hook(lambda _, inputs, routing: routing._replace(gates=0 * routing.gates))
        case "a subclass":
            value.__class__ = type("Twice", (type(value),), {"forward": lambda self, x: 2 * F.linear(x, self.weight)})
        case "a parametrization":
            torch.nn.utils.parametrizations.weight_norm(value).parametrizations.weight.original0.mul_(2)
    decoder, expected = Decoder(model, 1, 24), full(model, tokens_of(20)).logits
    decoder.open(0)
    torch.testing.assert_close(decoder.read(0, tokens_of(20), every=True).logits, expected[0], **CLOSE)
    assert not torch.allclose(before, expected, **CLOSE)


def test_a_followed_model_is_decoded_by_the_kernel() -> None:
    model = small_model(RULES["expert_threshold"])
    before = Decoder(model, 1, 24).kernel is None
    follow(model, torch.optim.SGD(model.parameters(), 0.1))
    assert (Decoder(model, 1, 24).kernel is None) == before

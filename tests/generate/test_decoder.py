"""The decoder equals the model's own forward, whatever shares its batch."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cases import PIECES, RULES, covering, small_model
from expert_threshold.generate import decoder
from expert_threshold.generate.decoder import Decoder
from expert_threshold.model import GPT
from expert_threshold.moe import follow
from rounding import assert_rounded

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "swiglu": {"activation": "swiglu", "shared_experts": 0, "softcap": None},
    "grouped_query": {"kv_heads": 1, "gate_norm": "fanout", "dense_layers": 0},
    "trunk": PIECES["all of them"],
}
both_ways = pytest.mark.usefixtures("by")
WAYS, MODES = ("operations", "kernel"), ("fast", "strict")


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(270), k=length)


@torch.no_grad()
def full(model: GPT, tokens: list[int]) -> Any:
    return model(torch.tensor([tokens]), record=True)


@pytest.mark.parametrize(
    ("rule", "options", "mode", "by"), covering(product(RULES, OPTIONS, MODES, WAYS)), indirect=["by"]
)
def test_logits_and_routing_of_a_sequence_equal_the_full_forward(
    rule: str, options: str, mode: str, by: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "PREFILL", 16)
    model = small_model(RULES[rule], **OPTIONS[options])
    tokens, decoded = tokens_of(40), Decoder(model, 3, 48, strict=mode == "strict")
    decoded.open(1)
    outputs = [decoded.read(1, piece, every=True) for piece in (tokens[:16], tokens[16:19], tokens[19:20])]
    outputs += [decoded.step({1: token}) for token in tokens[20:]]
    expected = full(model, tokens)
    torch.testing.assert_close(torch.cat([o.logits for o in outputs]), expected.logits[0], **CLOSE)
    for layer, routing in enumerate(expected.routings):
        scores = torch.cat([o.scores[layer] for o in outputs])
        torch.testing.assert_close(scores, routing.scores[0], **CLOSE)
        assert torch.equal(torch.cat([o.assignment[layer] for o in outputs]), routing.assignment[0])


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
def test_rows_that_are_not_asked_for_stay_as_they_are() -> None:
    decoded = Decoder(small_model(), 3, 8)
    for row in (0, 1, 2):
        decoded.open(row)
        decoded.read(row, [1])
    before = decoded.cache.held.clone()
    results = decoded.step({0: 5, 2: 5})
    assert decoded.cache.lengths == [2, 1, 2]
    assert torch.equal(decoded.cache.held[:, 1], before[:, 1])
    assert results.assignment.shape[1] == 2


@both_ways
@torch.no_grad()
def test_in_bfloat16_it_is_within_its_rounding_of_float32_as_the_full_forward_is() -> None:
    model, tokens = small_model(None), tokens_of(40)
    expected = model(torch.tensor([tokens])).logits[0]
    model.compute_dtype = torch.bfloat16
    decoded = Decoder(model, 1, 40)
    logits = torch.cat(
        [decoded.read(0, tokens[:30], every=True).logits, *(decoded.step({0: t}).logits for t in tokens[30:])]
    )
    assert_rounded(logits, expected, 4)  # two in each of two layers
    assert_rounded(model(torch.tensor([tokens])).logits[0], expected, 4)


@both_ways
def test_a_row_holds_no_more_than_its_capacity() -> None:
    decoded = Decoder(small_model(), 1, 4)
    decoded.open(0)
    with pytest.raises(ValueError, match="5 tokens do not fit in a row of 4"):
        decoded.read(0, [1] * 5)
    decoded.read(0, [1] * 4)
    with pytest.raises(ValueError, match="5 tokens do not fit in a row of 4"):
        decoded.step({0: 1})


@torch.no_grad()
@pytest.mark.parametrize("adapted", ["a hook", "a hook of a router", "a subclass", "a parametrization"])
def test_adapters_and_hooks_act_while_decoding(adapted: str) -> None:
    """Decoders copied weights alone: texts were silently those of the model without adapters."""
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

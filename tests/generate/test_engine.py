"""Generation: the cache, sampling, stopping, streaming and recorded routing."""

from __future__ import annotations

import copy
import unicodedata
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import RULES, small_model
from expert_threshold.data import Tokenizer
from expert_threshold.generate import LEGEND, Step, TokenRouting, engine, generate, printable, render_routing
from expert_threshold.model import GPT
from expert_threshold.routing import Rule

from .test_batching import run

CONTEXT = 64
with_every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


LONG = small_model(context=10_000)


def say(tokenizer: Tokenizer, tokens: list[int], **options: Any) -> list[Step]:
    """Return the steps of a model that generates these tokens."""
    with mock.patch.object(engine.ActiveRequest, "choose", side_effect=tokens):
        return list(generate(LONG, tokenizer, [0], max_tokens=len(tokens), **options))


def tokens_of(steps: Iterator[Step]) -> list[int]:
    return [step.token for step in steps]


@with_every_rule
def test_greedy_text_equals_repeated_full_forwards(tokenizer: Tokenizer, rule: Rule | None) -> None:
    model = small_model(rule)
    for length in (9, 1, 20):
        ids = torch.randint(tokenizer.bos, (1, length))
        steps = list(generate(model, tokenizer, ids[0].tolist(), max_tokens=12, temperature=0))
        for step in steps:
            with torch.no_grad():
                log_probabilities = model(ids).logits[0, -1].log_softmax(0)
            assert step.token == int(log_probabilities.argmax())
            assert step.logprob == pytest.approx(float(log_probabilities[step.token]), abs=1e-4)
            ids = torch.cat((ids, torch.tensor([[step.token]])), 1)


def test_a_text_opens_a_document(tokenizer: Tokenizer, model: GPT) -> None:
    ids = [tokenizer.bos, *tokenizer.encode("the cat")]
    text, same = (tokens_of(generate(model, tokenizer, prompt, max_tokens=8, seed=1)) for prompt in ("the cat", ids))
    assert text == same


def test_a_seed_gives_the_same_tokens_whatever_the_global_generator(tokenizer: Tokenizer, model: GPT) -> None:
    def sampled(seed: int | None) -> list[int]:
        return tokens_of(generate(model, tokenizer, "a", max_tokens=20, temperature=1, seed=seed))

    torch.manual_seed(1)
    first, state = sampled(7), torch.get_rng_state()
    torch.manual_seed(2)
    assert sampled(7) == first
    assert sampled(8) != first
    assert sampled(None) != sampled(None)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)  # and the global generator was never drawn from


@pytest.mark.usefixtures("by")
def test_top_k_never_leaves_the_k_likeliest_and_reaches_all_of_them() -> None:
    logits = torch.randn(100, generator=torch.Generator().manual_seed(0))
    sampler = engine.Sampler(5.0, 4, torch.Generator().manual_seed(0))
    assert {sampler(logits) for _ in range(400)} == set(logits.topk(4).indices.tolist())


@pytest.mark.usefixtures("by")
def test_samples_follow_the_softmax_at_their_temperature() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    sampler = engine.Sampler(0.7, None, torch.Generator().manual_seed(0))
    counts = torch.bincount(torch.tensor([sampler(logits) for _ in range(4000)]), minlength=4)
    torch.testing.assert_close(counts / 4000, (logits / 0.7).softmax(0), atol=0.03, rtol=0)


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 5e-324])
def test_as_the_temperature_goes_to_zero_sampling_becomes_greedy(
    tokenizer: Tokenizer, model: GPT, temperature: float
) -> None:
    greedy = tokens_of(generate(model, tokenizer, "the", max_tokens=15, temperature=0))
    for top_k in (None, 50, 1):
        cold = generate(model, tokenizer, "the", max_tokens=15, temperature=temperature, top_k=top_k, seed=0)
        assert tokens_of(cold) == greedy


def test_generation_stops_where_the_document_ends_without_a_text_for_it(tokenizer: Tokenizer) -> None:
    said = [*tokenizer.encode("the mat"), tokenizer.bos, *tokenizer.encode("more")]
    steps = say(tokenizer, said)
    assert [step.token for step in steps] == said[: said.index(tokenizer.bos) + 1]
    assert "".join(step.text for step in steps) == "the mat"
    assert [step.finish for step in steps] == [None] * (len(steps) - 1) + ["stop"]

    steps = say(tokenizer, said, stop_at_document_end=False)
    assert "".join(step.text for step in steps) == "the mat<|bos|>more"
    assert steps[-1].finish == "length"


def test_prompt_and_continuation_fill_the_context_and_no_more(tokenizer: Tokenizer, model: GPT) -> None:
    steps = list(generate(model, tokenizer, [1] * 40, max_tokens=1000, stop_at_document_end=False, record=True))
    assert len(steps) == CONTEXT - 40
    assert [step.finish for step in steps] == [None] * 23 + ["length"]
    with pytest.raises(ValueError, match="prompt of 64 tokens leaves no room in a context of 64"):
        generate(model, tokenizer, [1] * CONTEXT, max_tokens=1)


@given(said=st.one_of(st.text(min_size=1).map(str.encode), st.lists(st.integers(0, 269), min_size=1)))
@settings(max_examples=100)
def test_streamed_pieces_make_the_whole_text_and_break_no_character(
    tokenizer: Tokenizer, said: bytes | list[int]
) -> None:
    """Ids below 256 are bytes, so a character has as many tokens as bytes."""
    pieces = [step.text for step in say(tokenizer, list(said), stop_at_document_end=False)]
    whole = tokenizer.decode(list(said))
    assert "".join(pieces) == whole
    assert whole.count("\ufffd") == sum(piece.count("\ufffd") for piece in pieces)


@with_every_rule
def test_the_recorded_routing_is_that_of_the_step_s_own_token(tokenizer: Tokenizer, rule: Rule | None) -> None:
    model = small_model(rule)
    prompt = [5, 6, 7]
    steps = list(generate(model, tokenizer, prompt, max_tokens=10, seed=0, record=True))
    assert tokens_of(generate(model, tokenizer, prompt, max_tokens=10, seed=0)) == [step.token for step in steps]
    with torch.no_grad():
        full = model(torch.tensor([prompt + [step.token for step in steps]]), record=True)
    for position, step in enumerate(steps, len(prompt)):
        assert len(step.routing) == len(full.routings)
        for layer, routing in zip(step.routing, full.routings, strict=True):
            scores, chosen = routing.scores[0, position], routing.assignment[0, position]
            assert layer.scores == pytest.approx(scores.tolist(), abs=1e-4)
            assert list(layer.experts) == chosen.nonzero()[:, 0].tolist()
            assert layer.gates == pytest.approx(scores[chosen].sigmoid().tolist(), abs=1e-4)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_stays_as_it_was_and_its_mode_means_nothing(tokenizer: Tokenizer, training: bool) -> None:
    model = small_model()
    greedy = tokens_of(generate(model, tokenizer, "a", max_tokens=5, temperature=0))
    model.train(training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert tokens_of(generate(model, tokenizer, "a", max_tokens=5, temperature=0)) == greedy
    steps = generate(model, tokenizer, "a", max_tokens=3, stop_at_document_end=False)
    next(steps)
    steps.close()  # given up early
    assert all(module.training == training for module in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"seed": -1}, "seed=-1 must be"),
        ({"seed": 2**63}, "seed=9223372036854775808 must be"),
        ({"temperature": -1.0}, r"temperature=-1\.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_k": 0}, "top_k=0"),
        ({"prompt": []}, "prompt has no tokens"),
    ],
)
def test_nonsense_is_refused_before_anything_runs(
    tokenizer: Tokenizer, model: GPT, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generate(model, tokenizer, **({"prompt": "a", "max_tokens": 1} | options))


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_end_the_text(tokenizer: Tokenizer, temperature: float, value: float) -> None:
    model = small_model()
    model.blocks[-1].attention.output.weight.fill_(value)
    with pytest.raises(ValueError, match="logits are not finite"):
        list(generate(model, tokenizer, "the cat", max_tokens=5, temperature=temperature))


@torch.no_grad()
@pytest.mark.usefixtures("by")
def test_a_text_that_is_not_finite_leaves_nothing_in_its_row(tokenizer: Tokenizer) -> None:
    model = small_model()
    bad = tokenizer.encode("hat")[0]
    model.embed.weight[bad] = torch.nan
    good = tuple(token for token in range(40, 60) if token != bad)
    long_one = engine.Request(good, 20, temperature=0)  # by chance it could draw the bad token
    requests = [engine.Request((bad, *good), 3), long_one, engine.Request(good[:3], 3, temperature=0)]
    broken, long, short = run(engine.Engine(model, tokenizer, slots=2), requests)
    assert broken.error == engine.NOT_FINITE
    assert not broken.steps
    assert long.error is short.error is None
    alone = generate(model, tokenizer, good[:3], max_tokens=3, temperature=0)
    assert [step.token for step in short.steps] == tokens_of(alone)


@torch.no_grad()
@pytest.mark.parametrize(("max_tokens", "record"), [(1, False), (1, True), (3, False)])
def test_a_token_after_which_nothing_is_finite_is_the_last_and_has_no_routing(
    tokenizer: Tokenizer, model: GPT, max_tokens: int, record: bool
) -> None:
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0, "stop_at_document_end": False}
    token, *_ = tokens_of(generate(model, tokenizer, "the cat", **options))
    broken = copy.deepcopy(model)
    broken.embed.weight[token] = torch.nan
    steps = generate(broken, tokenizer, "the cat", record=record, **options)
    if not record:
        assert next(steps).token == token
    if record or max_tokens > 1:
        with pytest.raises(ValueError, match="logits are not finite"):
            next(steps)
    assert not list(steps)


def test_a_token_s_colour_says_how_many_experts_it_went_to() -> None:
    def step(*fanouts: int) -> Step:
        routing = tuple(TokenRouting((0.0,) * 16, tuple(range(n)), (0.5,) * n) for n in fanouts)
        return Step(0, "hat", -1.0, None, routing)

    rendered = [render_routing(step(*fanouts)) for fanouts in ((0, 0), (1, 0), (1, 1), (16, 16))]
    assert [segment.text for segment in rendered] == ["hat"] * 4
    assert len({str(segment.style) for segment in rendered}) == 4
    assert render_routing(step()).text == "hat"  # a dense model
    assert "0.5" in LEGEND.plain


@given(st.text())
def test_control_characters_are_escaped_and_other_text_is_unchanged(text: str) -> None:
    shown = printable(text)
    assert not [c for c in shown if (ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160]
    if not any(unicodedata.category(c) == "Cc" for c in text):
        assert shown == text
    assert printable("\x1b[2J\r\n\tγ\x9b") == "\\x1b[2J\\x0d\n\tγ\\x9b"

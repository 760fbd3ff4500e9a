"""Many requests in one running batch: each gets what it would get alone."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import small_model, small_tokenizer
from expert_threshold.data import Tokenizer
from expert_threshold.generate import decoder as decoder_module
from expert_threshold.generate.engine import ActiveRequest, Engine, Request, Sampler, Step, TextStream, penalize

BOS = small_tokenizer().bos


def requests(count: int, **options: object) -> list[Request]:
    chance = random.Random(0)
    return [
        Request(
            tuple(chance.choices(range(269), k=chance.randint(1, 20))),
            max_tokens=chance.randint(5, 25),
            **({"temperature": 0, "stop_at_document_end": False} | options),  # type: ignore[arg-type]
        )
        for _ in range(count)
    ]


def run(engine: Engine, every: Iterable[Request], *, at: int = 0) -> list[ActiveRequest]:
    """Finish all requests, each of which joins `at` steps after the one before."""
    writings = []
    for request in every:
        writings.append(engine.add(request))
        for _ in range(at):
            engine.step()
    while engine.busy:
        engine.step()
    return writings


def tokens(writing: ActiveRequest) -> list[int]:
    return [step.token for step in writing.steps]


def text_of(steps: Iterable[Step]) -> str:
    return "".join(step.text for step in steps)


@pytest.mark.usefixtures("by")
def test_sampled_tokens_depend_on_the_seed_and_not_on_the_company(tokenizer: Tokenizer) -> None:
    model = small_model()
    every = [request._replace(seed=i, temperature=0.9, top_p=0.9) for i, request in enumerate(requests(5))]
    alone = [tokens(run(Engine(model, tokenizer, strict=True), [request])[0]) for request in every]
    assert [tokens(w) for w in run(Engine(model, tokenizer, strict=True), reversed(every), at=1)] == alone[::-1]
    again = run(Engine(model, tokenizer), [every[0]._replace(seed=99), every[0]._replace(seed=None)])
    assert len({tuple(written) for written in [alone[0], *map(tokens, again)]}) == 3


def test_requests_wait_for_a_row_in_order_and_a_cancelled_one_frees_its_row_at_once(tokenizer: Tokenizer) -> None:
    engine = Engine(small_model(), tokenizer, slots=2)
    first, second, third, fourth = (engine.add(request._replace(max_tokens=20)) for request in requests(4))
    engine.step()
    assert list(engine.running.values()) == [first, second]
    engine.cancel(third)
    engine.cancel(first)
    assert list(engine.running.values()) == [second]
    engine.step()
    assert list(engine.running.values()) == [second, fourth]
    while engine.busy:
        engine.step()
    assert len(second.steps) == len(fourth.steps) == 20
    assert not third.steps
    assert engine.decoder.cache.lengths == [0, 0]


def test_a_long_prompt_does_not_hold_up_those_that_write(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_module, "PREFILL", 8)
    engine = Engine(small_model(), tokenizer)
    short = engine.add(Request((1,), 30, temperature=0, stop_at_document_end=False))
    engine.step()
    long = engine.add(Request((2,) * 40, 1, temperature=0))
    for step in range(5):
        assert not long.steps
        engine.step()
        assert len(short.steps) == step + 1
    engine.step()
    assert len(long.steps) == 1


def test_an_echoed_prompt_has_the_model_s_logprobs_and_its_own_text(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_module, "PREFILL", 7)
    model = small_model()
    ids = [tokenizer.bos, *tokenizer.encode("the cät sat on the mat")]
    (writing,) = run(Engine(model, tokenizer), [Request(tuple(ids), 0, echo=True, tops=3, record=True)])
    with torch.no_grad():
        output = model(torch.tensor([ids]), record=True)
    logprobs = output.logits[0].log_softmax(-1)
    assert [step.token for step in writing.steps] == ids
    assert text_of(writing.steps) == "the cät sat on the mat"
    assert writing.steps[0].logprob is None
    for i, step in enumerate(writing.steps[1:]):
        assert step.logprob == pytest.approx(float(logprobs[i, ids[i + 1]]), abs=1e-4)
        likeliest = logprobs[i].topk(3)
        assert [token for token, _ in step.top] == likeliest.indices.tolist()
        assert [logprob for _, logprob in step.top] == pytest.approx(likeliest.values.tolist(), abs=1e-4)
        for layer, routing in zip(step.routing, output.routings, strict=True):
            assert list(layer.experts) == routing.assignment[0, i + 1].nonzero()[:, 0].tolist()
    assert writing.finished
    assert all(step.echoed for step in writing.steps)


@pytest.mark.parametrize("prefill", [1, 256])
@pytest.mark.parametrize(
    ("prompt", "follows", "echo", "texts"),
    [
        ([97, 0xF0, 0x9D, 0x84], [0x9E, 98], True, ("a", "𝄞b")),
        ([97, 0xF0, 0x9D, 0x84], [0x9E, 98], False, ("", "�b")),
        ([97, 0xC3], [98], True, ("a", "�b")),
        ([97, 0xC3], [98], False, ("", "b")),
        ([97, 0xC3], [], True, ("a�", "")),
        ([97, 0xC3], [BOS], True, ("a", "�")),
        ([97, 0xC3], [BOS], False, ("", "")),
        ([0xC3, BOS, 0xA9], [98], True, ("��", "b")),
        ([97, 0xC3, BOS], [98], True, ("a�", "b")),
    ],
)
def test_a_character_split_between_an_echoed_prompt_and_its_continuation_is_whole(
    prompt: list[int],
    follows: list[int],
    echo: bool,
    texts: tuple[str, str],
    prefill: int,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: each half of the character was replaced by U+FFFD."""
    monkeypatch.setattr(decoder_module, "PREFILL", prefill)
    chosen = iter(follows)
    monkeypatch.setattr(ActiveRequest, "choose", lambda writing: next(chosen))
    (writing,) = run(Engine(small_model(), tokenizer), [Request(tuple(prompt), len(follows), echo=echo)])
    assert tuple(text_of(s for s in writing.steps if s.echoed == echoed) for echoed in (True, False)) == texts


@pytest.mark.usefixtures("by")
def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()[[2, 0, 3, 1]]
    for top_p, kept in ((1e-9, {1}), (0.5, {1}), (0.51, {1, 3}), (0.8, {1, 3}), (0.81, {0, 1, 3}), (1.0, {0, 1, 2, 3})):
        sampler = Sampler(1.0, None, torch.Generator().manual_seed(0), top_p)
        assert {sampler(logits) for _ in range(300)} == kept


def test_a_repetition_penalty_lowers_the_logits_of_tokens_that_occurred(tokenizer: Tokenizer) -> None:
    logits = torch.tensor([2.0, -2.0, 3.0])
    assert penalize(logits, [0, 1, 0], 2.0).tolist() == [1.0, -4.0, 3.0]
    asked = Request((tokenizer.bos, 5), 20, temperature=0, stop_at_document_end=False)
    model = small_model()
    for penalty, repeats in ((1.0, True), (100.0, False)):
        (writing,) = run(Engine(model, tokenizer), [asked._replace(repetition_penalty=penalty)])
        every = [*asked.prompt, *tokens(writing)]
        assert (len(set(every)) < len(every)) == repeats
    for option, value in (("repetition_penalty", 1e-300), ("top_p", 0.0), ("top_p", 1.5)):
        with pytest.raises(ValueError, match=option):
            asked._replace(**{option: value}).check(64)


@given(
    text=st.text("abc", max_size=30),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
@settings(max_examples=100)
def test_a_text_ends_before_its_first_stop_string_however_it_is_cut(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    shown, stopped, stream = "", False, TextStream()
    for a, b in [*pairwise(places)] or [(0, 0)]:
        part, stopped = stream.push(text[a:b].encode(), final=b == len(text), stop=stop)
        shown += part
        assert text.startswith(shown)
        if stopped:
            break
    found = [text.find(s) for s in stop if s in text]
    assert stopped == bool(found)
    # A stop string that is complete first ends the text, even if a longer one started before it.
    assert len(shown) >= min(found) if stopped else shown == text
    assert not any(s in shown for s in stop)


def test_a_stop_string_across_tokens_ends_a_request(tokenizer: Tokenizer) -> None:
    model = small_model()
    request = Request((1,), 30, temperature=0, stop_at_document_end=False)
    (whole,) = run(Engine(model, tokenizer), [request])
    text = text_of(whole.steps)
    stop = text[7:11]
    (writing,) = run(Engine(model, tokenizer), [request._replace(stop=(stop,))])
    assert text_of(writing.steps) == text[: text.index(stop)]
    assert writing.steps[-1].finish == "stop"
    assert len(writing.steps) < len(whole.steps)

"""Which requests /v1/completions accepts, and which it rejects."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import small_tokenizer
from expert_threshold.data import Tokenizer
from expert_threshold.generate.engine import Step
from expert_threshold.serve.completion import Answer, Completion, Parser
from expert_threshold.serve.worker import ApiError, Limits

CONTEXT = 64


@pytest.fixture(scope="module")
def parser() -> Parser:
    return Parser(small_tokenizer(), CONTEXT, "small", Limits(n=3, texts=6, stop_characters=99))


@pytest.fixture(scope="module")
def tokenizer(parser: Parser) -> Tokenizer:
    return parser.tokenizer


def attempt(parser: Parser, body: bytes) -> Any:
    """Return the parsed request, or the error."""
    try:
        return parser(body)
    except ApiError as error:
        return error


def parse(parser: Parser, **fields: Any) -> Completion:
    return parser(json.dumps({"model": "small"} | fields).encode())


def refusal(parser: Parser, **fields: Any) -> ApiError:
    error = attempt(parser, json.dumps({"model": "small"} | fields).encode())
    assert isinstance(error, ApiError)
    return error


def test_a_text_opens_a_document_and_token_ids_are_taken_as_they_are(parser: Parser, tokenizer: Tokenizer) -> None:
    cat, mat = tokenizer.encode("the cat"), tokenizer.encode("the mat")
    bos = tokenizer.bos
    assert parse(parser).prompts == ((bos,),)
    assert parse(parser, prompt=None).prompts == ((bos,),)
    assert parse(parser, prompt="the cat").prompts == ((bos, *cat),)
    assert parse(parser, prompt=["the cat", "the mat"]).prompts == ((bos, *cat), (bos, *mat))
    assert parse(parser, prompt=cat).prompts == (tuple(cat),)
    assert parse(parser, prompt=[cat, mat]).prompts == (tuple(cat), tuple(mat))
    assert parse(parser, prompt="the cat").opened
    assert not parse(parser, prompt=cat).opened


def test_each_of_n_texts_has_its_own_seed_in_any_batch(parser: Parser) -> None:
    requests = parse(parser, prompt=["a", "b"], n=3, seed=-1).requests
    assert [request.seed for request in requests] == [2**63 - 1, 0, 1] * 2
    assert [request.prompt for request in requests[::3]] == [request.prompt for request in requests[2::3]]
    assert [request.seed for request in parse(parser, n=2).requests] == [None, None]


def test_defaults_are_openais(parser: Parser) -> None:
    names = ("max_tokens", "n", "temperature", "top_p", "stream", "echo", "stop", "logprobs")
    for asked in (parse(parser), parse(parser, **dict.fromkeys(names))):
        assert (asked.n, asked.stream, asked.logprobs) == (1, False, None)
        request = asked.request
        assert (request.max_tokens, request.temperature, request.top_p, request.top_k) == (16, 1.0, 1.0, None)
        assert (request.stop, request.echo, request.tops) == ((), False, 0)


@pytest.mark.parametrize(("context", "limits"), [(CONTEXT, Limits(output_tokens=8)), (8, Limits())])
def test_no_default_is_out_of_its_range(context: int, limits: Limits) -> None:
    few = Parser(small_tokenizer(), context, "small", limits, dial=4)
    fields = few.model.model_json_schema()["properties"]
    assert fields["max_tokens"]["default"] == fields["max_tokens"]["anyOf"][0]["maximum"] == 8
    few.model(model="small", **{name: field["default"] for name, field in fields.items() if "default" in field})


def test_options_reach_the_engine(parser: Parser) -> None:
    asked = parse(
        parser, prompt="a", max_tokens=0, temperature=0.5, top_p=0.9, top_k=7, repetition_penalty=1.5, stop="end",
        echo=True, logprobs=5, stream=True, stream_options={"include_usage": True}, user="me", best_of=2, n=2,
        presence_penalty=0.0,
    )  # fmt: skip
    assert asked.request._replace(seed=None) == asked.request._replace(
        max_tokens=0, temperature=0.5, top_p=0.9, top_k=7, repetition_penalty=1.5, stop=("end",), echo=True, tops=5
    )
    assert (asked.stream, asked.include_usage, asked.n, asked.logprobs) == (True, True, 2, 5)
    stops = tuple(map(chr, range(99, 99 + 64)))  # limited by their characters alone
    assert parse(parser, stop=stops).request.stop == stops
    assert parse(parser, top_p=0).request.temperature == 0  # the likeliest token alone


BAD: dict[str, list[Any]] = {
    "model": ["other", None, "\ud800" * 100],
    "prompt": [3, [], [[]], ["a", 1], [1, "a"], [True], [1.0], [270], [-1], [[1], "a"], ["a"] * 7, [1] * 65],
    "max_tokens": [65, 1.5, True, 10**400],
    "stop": ["", ["a"] * 100, "a" * 100, [1]],
    "ignore_eos": [True, 0],
    "temperature": ["hot"], "top_k": [0], "seed": [2**63], "echo": [1], "best_of": [2], "user": [1],
    "stream_options": [{"include_usage": True}],  # without stream
    "temprature": [1], "\ud800": [1],
}  # fmt: skip
BAD_TOGETHER: list[tuple[str, dict[str, Any]]] = [
    ("n", {"prompt": ["a"] * 3, "n": 3}),
    ("max_tokens", {"prompt": [1] * 60, "max_tokens": 5}),
    ("stream_options", {"stream": True, "stream_options": []}),
    ("stream_options.x", {"stream": True, "stream_options": {"x": 1}}),
    ("stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": 1}}),
    ("stream_options.include_obfuscation", {"stream": True, "stream_options": {"include_obfuscation": True}}),
]


@pytest.mark.parametrize(
    ("param", "fields"), [*((name, {name: value}) for name, values in BAD.items() for value in values), *BAD_TOGETHER]
)
def test_a_bad_field_is_named(param: str, fields: dict[str, Any], parser: Parser) -> None:
    error = refusal(parser, **fields)
    assert (error.status, error.param) == (404 if isinstance(fields.get("model"), str) else 400, param)
    assert json.dumps(error.body)
    assert "\n" not in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"suffix": "x"}, "suffix='x' is not supported; leave it out"),
        ({"logit_bias": {"5": 1}}, "logit_bias={'5': 1} is not supported; leave it out"),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5 is not supported; leave it out"),
        ({"stop": ["a", 1]}, "stop=['a', 1] must be a string or a list of strings"),
        ({"": 1}, "unknown field ''"),
    ],
)
def test_a_bad_field_is_told_in_plain_words(fields: dict[str, Any], message: str, parser: Parser) -> None:
    """Regression: pydantic counted dictionary items after validation, and named an empty field by its value."""
    assert refusal(parser, **fields).message == message


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b'{"model": "small", "temperature": NaN}',
        b'{"model": "small", "temperature": Infinity}', b'{"model": "small", "seed": -Infinity}',
        b'{"model": "small", "max_tokens": ' + b"9" * 5000 + b"}", b"[" * 60_000, b'{"a":' * 10_000, b"{} {}",
    ],
)  # fmt: skip
def test_a_body_that_is_no_object_of_json_is_refused(body: bytes, parser: Parser) -> None:
    error = attempt(parser, body)
    assert (error.status, error.code) == (400, "invalid_json")


def test_however_deep_a_value_is_nested_it_is_refused(parser: Parser) -> None:
    for depth in range(800, 1100):
        nested = b"[" * depth + b"]" * depth
        assert isinstance(attempt(parser, b'{"model": "small", "seed": ' + nested + b"}"), ApiError)


def test_limits_of_tokens_are_kept() -> None:
    parser = Parser(small_tokenizer(), CONTEXT, "small", Limits(prompt_tokens=5, output_tokens=7))
    assert parse(parser, prompt=[1] * 5, max_tokens=7)
    assert refusal(parser, prompt=[1] * 6, max_tokens=7).code == "prompt_too_long"
    assert refusal(parser, prompt=[1] * 5, max_tokens=8).param == "max_tokens"


@pytest.mark.parametrize("name", ["body_bytes", "prompt_tokens", "n", "queue", "seconds", "header_seconds"])
def test_a_limit_of_nothing_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0 must be"):
        Limits(**{name: 0})


NAMES = st.sampled_from(
    ["model", "prompt", "max_tokens", "n", "stream", "stream_options", "logprobs", "echo", "stop", "temperature",
     "top_p", "top_k", "seed", "user", "best_of", "logit_bias", "suffix", "presence_penalty"]
)  # fmt: skip
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.integers()
    | st.floats(allow_nan=True)
    | st.sampled_from(["small", "the cat", ""])
    | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES | st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(fields=st.dictionaries(NAMES | st.text(max_size=3), VALUES, max_size=6), known=st.booleans())
@settings(max_examples=200)
def test_whatever_is_asked_is_understood_or_refused(fields: dict[str, Any], known: bool, parser: Parser) -> None:
    """The engine accepts every request that is parsed, within the limits."""
    body = json.dumps(fields | ({"model": "small"} if known else {})).encode()
    asked = attempt(parser, body)
    if isinstance(asked, ApiError):
        assert 400 <= asked.status < 500
        assert json.dumps(asked.body, allow_nan=False)
        return
    assert 1 <= len(asked.requests) <= 6
    for request in asked.requests:
        request.check(CONTEXT)
        assert len(request.prompt) + request.max_tokens <= CONTEXT


# Responses.


def step(token: int, text: str, finish: Any = None, logprob: float | None = -1.0, *, echoed: bool = False) -> Step:
    return Step(token, text, logprob, finish, None, ((97, -0.5), (token, logprob or 0.0)), echoed)


def test_tokens_are_reported_with_their_text_offsets(parser: Parser, tokenizer: Tokenizer) -> None:
    """The steps of an é, split between its two bytes, and of the text around it."""
    asked = parse(parser, prompt="a", echo=True, logprobs=2)
    (choice,) = Answer(asked, tokenizer).choices
    first = choice.piece([step(tokenizer.bos, "", logprob=None), step(97, "a", echoed=True)], finished=False)
    assert first["text"] == "a"
    assert first["logprobs"]["tokens"] == ["a"]  # the token that starts the document was not requested
    steps = [step(0xC3, ""), step(0xA9, "é"), step(98, "b"), step(tokenizer.bos, "", "stop")]
    piece = choice.piece(steps, finished=True)
    assert piece["text"] == "éb"
    assert piece["finish_reason"] == "stop"
    logprobs = piece["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "b", "<|bos|>"]
    assert logprobs["text_offset"] == [1, 1, 2, 3]
    assert logprobs["token_logprobs"] == [-1.0] * 4
    assert logprobs["top_logprobs"][2] == {"a": -0.5, "b": -1.0}
    assert choice.written == 4


def test_a_character_begun_by_the_prompt_starts_at_the_prompt_s_end(parser: Parser, tokenizer: Tokenizer) -> None:
    asked = parse(parser, prompt=[[98], [97, 0xC3]], n=2, echo=True, logprobs=0)
    choice = Answer(asked, tokenizer).choices[3]
    steps = [step(97, "a"), step(0xC3, ""), step(0xA9, "é"), step(98, "b")]
    assert choice.piece(steps, finished=True)["logprobs"]["text_offset"] == [0, 1, 1, 2]
    broken = [step(0xC3, ""), step(98, "�b")]
    choice = Answer(asked, tokenizer).choices[0]
    assert choice.piece(broken, finished=True)["logprobs"]["text_offset"] == [0, 1]


def test_an_opening_token_in_the_prompt_is_reported_without_a_logprob(parser: Parser, tokenizer: Tokenizer) -> None:
    (choice,) = Answer(parse(parser, prompt=[tokenizer.bos, 97], echo=True, logprobs=2), tokenizer).choices
    told = choice.piece([step(tokenizer.bos, "", logprob=None), step(97, "a")], finished=False)["logprobs"]
    assert (told["tokens"], told["token_logprobs"]) == (["<|bos|>", "a"], [None, -1.0])
    assert told["top_logprobs"][0] is None


def test_what_is_not_supported_may_be_declined(parser: Parser) -> None:
    """Some clients send every field that they know."""
    options = {"include_usage": True, "include_obfuscation": False, "continuous_usage_stats": False}
    neutral: dict[str, Any] = dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p"), 0)
    neutral |= {"logit_bias": {}, "suffix": "", "ignore_eos": False}
    assert parse(parser, prompt="a", stream=True, stream_options=options, **neutral).include_usage
    assert parse(parser, **dict.fromkeys(neutral)).requests

"""The requests, responses and errors of /v1/completions, in OpenAI's format.

As in OpenAI's API, unknown fields are rejected, and null selects a field's default. Fields of that API that this server
does not support (`best_of`, `logit_bias`, `presence_penalty`, …) are rejected unless they have their neutral value.
Additions are `top_k`, `repetition_penalty`, and `rate`, the number of routed experts per token for this request.

Types and ranges are checked by pydantic, which the extra `serve` installs, and are described in /openapi.json.
"""

from __future__ import annotations

import codecs
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from ..data import Tokenizer
from ..data.tokenizer import BOS
from ..generate.engine import Request, Step
from .worker import ApiError, Limits

MAX_TOKENS = 16
"""The default of max_tokens, which is the same as in OpenAI's API, unless the server's limit is lower."""

SEEDS = 2**63


def invalid(name: str, value: object, must: str, *, code: str | None = None) -> ApiError:
    """Return a 400 error that names a field, its value, and the requirement that the value violates."""
    return ApiError(400, f"{name}={shown(value)} {must}", param=name, code=code)


def shown(value: object) -> str:
    """Return a client's value for an error message, truncated if it is long."""
    try:
        text = ascii(value)
    except RecursionError:
        return "…"
    return text if len(text) <= 60 else f"{text[:60]}…"


Fields = dict[str, tuple[Any, Any]]
"""The type and default of each field of a request, keyed by name, in the form that pydantic expects."""


ZERO = (float | None, Field(None, ge=0, le=0))
_FLAG = BeforeValidator(lambda value: value if isinstance(value, bool) else str(value))  # 0 equals False
OFF = (Annotated[Literal[False], _FLAG] | None, None)
NEUTRAL: Fields = {
    "presence_penalty": ZERO,
    "frequency_penalty": ZERO,
    "min_p": ZERO,
    "logit_bias": (dict[str, Any] | None, Field(None, max_length=0)),
    "suffix": (str | None, Field(None, max_length=0)),
    "ignore_eos": OFF,
}
"""Fields of OpenAI and vLLM that are not supported, and are accepted only with values that have no effect."""
STREAM_OPTIONS: Fields = {
    "include_usage": (bool | None, None), "include_obfuscation": OFF, "continuous_usage_stats": OFF
}  # fmt: skip
UNSUPPORTED = "is not supported; leave it out"

MUST = dict.fromkeys((*NEUTRAL, *(f"stream_options.{name}" for name in STREAM_OPTIONS)), UNSUPPORTED) | {
    "prompt": "must be a string, a list of strings, a list of token ids, or a list of such lists",
    "stop": "must be a string or a list of strings",
}
"""Error messages for fields where pydantic would mention only the neutral value, or only one of several types."""


def sampling_fields(limits: Limits, context: int, dial: float | None) -> Fields:
    """Return the request fields that control sampling. dial: the largest rate, or None if the rate is fixed."""
    most = min(limits.output_tokens or context, context)
    return {
        "max_tokens": (int | None, Field(min(MAX_TOKENS, most), ge=0, le=most)),
        "temperature": (float | None, Field(1.0, ge=0, le=2)),
        "top_k": (int | None, Field(None, ge=1, lt=SEEDS)),
        "seed": (int | None, Field(None, ge=-SEEDS, lt=SEEDS)),
        "rate": (None, None) if dial is None else (float | None, Field(None, ge=0, le=dial)),
    }


def request_model(name: str, fields: Fields) -> type[BaseModel]:
    """Return the pydantic model of a request. It rejects unknown fields and does not convert types."""
    return create_model(name, __config__=ConfigDict(strict=True, extra="forbid"), **cast(Any, fields))


def completion_model(name: str, limits: Limits, context: int, dial: float | None) -> type[BaseModel]:
    """Return the pydantic model of a completion request. `Parser` checks the lengths of prompts and stop strings."""
    flag = (bool | None, None)
    return request_model(
        "CompletionRequest",
        sampling_fields(limits, context, dial)
        | {
            "model": (str, Field(json_schema_extra={"enum": [name]})),  # any other name is a 404
            "prompt": (str | list[str] | list[int] | list[list[int]] | None, None),
            "n": (int | None, Field(1, ge=1, le=limits.n)),
            "top_p": (float | None, Field(1.0, ge=0, le=1)),
            "repetition_penalty": (float | None, Field(1.0, ge=0.01, le=2)),
            "logprobs": (int | None, Field(None, ge=0, le=limits.logprobs)),
            "stop": (str | list[str] | None, None),
            "stream": flag,
            "stream_options": (request_model("StreamOptions", STREAM_OPTIONS) | None, None),
            "echo": flag,
            "user": (str | None, None),
            "best_of": (int | None, None),
            **NEUTRAL,
        },
    )


def validated(model: type[BaseModel], fields: Mapping[str, Any]) -> Any:
    """Validate a request, and replace null with defaults. Raises ApiError (400) if a field is invalid."""
    defaults = [name for name, field in model.model_fields.items() if not field.is_required()]
    try:
        return model.model_validate({k: v for k, v in fields.items() if v is not None or k not in defaults})
    except ValidationError as refused:
        error = refused.errors(include_url=False)[0]
    kind, place, must = error["type"], error["loc"], error["msg"].removeprefix("Input ")
    param = ".".join(map(str, place[: 2 if place[:1] == ("stream_options",) else 1])) if place else str(error["input"])
    if kind == "missing":
        raise ApiError(400, f"the field {param} is missing", param=param, code="missing_field")
    if kind in ("extra_forbidden", "string_unicode"):  # the latter for a name that is not valid text
        raise ApiError(400, f"unknown field {shown(param)}", param=param[:60], code="unknown_field")
    if kind == "none_required":
        must = "is not supported by this model, which has no cutoffs or no sketch of its scores; leave it out"
        raise invalid(param, error["input"], must, code="unsupported")
    must = must if kind == "bool_type" else MUST.get(param, must)
    code = "invalid_type" if kind.endswith("_type") else "unsupported" if must == UNSUPPORTED else "out_of_range"
    raise invalid(param, fields.get(param, error["input"]), must, code=code)


class Completion(NamedTuple):
    """A validated request. Its prompts are token ids. `opened` is True if they were texts, which start with BOS."""

    model: str
    prompts: tuple[tuple[int, ...], ...]
    opened: bool
    n: int
    stream: bool
    include_usage: bool
    logprobs: int | None
    request: Request  # shared by all texts, except for the prompt and the seed

    @property
    def requests(self) -> list[Request]:
        """Return n requests for each prompt. The i-th request for a prompt uses the seed plus i."""
        seeds = [_shift(self.request.seed, i) for i in range(self.n)]
        return [self.request._replace(prompt=prompt, seed=seed) for prompt in self.prompts for seed in seeds]


def _shift(seed: int | None, by: int) -> int | None:
    return None if seed is None else (seed + by) % SEEDS


class Parser:
    """Parses request bodies. Raises ApiError with a status below 500 if a body is invalid.

    dial: see `sampling_fields`.
    """

    def __init__(
        self, tokenizer: Tokenizer, context: int, name: str, limits: Limits, dial: float | None = None
    ) -> None:
        self.tokenizer, self.context, self.name, self.limits = tokenizer, context, name, limits
        self.model = completion_model(name, limits, context, dial)

    def __call__(self, body: bytes) -> Completion:
        fields = validated(self.model, read_object(body))
        require_model(fields.model, self.name)
        prompts, opened = self._prompts(fields.prompt)
        if len(prompts) * fields.n > self.limits.texts:
            number, param = f"{len(prompts)} × {fields.n}", "n" if len(prompts) <= self.limits.texts else "prompt"
            message = f"prompts × n = {number} texts, but a request may have at most {self.limits.texts}"
            raise ApiError(400, message, param=param, code="too_many_texts")
        self._require_room(prompts, fields.max_tokens)
        request = Request(
            prompt=(),
            max_tokens=fields.max_tokens,
            temperature=fields.temperature if fields.top_p > 0 else 0.0,  # top_p=0 keeps only the likeliest token
            top_k=fields.top_k,
            top_p=fields.top_p or 1.0,
            repetition_penalty=fields.repetition_penalty,
            seed=_shift(fields.seed, 0),
            stop=self._stop(fields.stop),
            tops=fields.logprobs or 0,
            echo=bool(fields.echo),
            rate=fields.rate,
        )
        options = fields.stream_options
        if options is not None and not fields.stream:
            raise invalid("stream_options", dict(options), "needs stream=true")
        if fields.best_of not in (None, 1, fields.n):
            raise invalid("best_of", fields.best_of, UNSUPPORTED, code="unsupported")
        usage = options is not None and bool(options.include_usage)
        return Completion(fields.model, prompts, opened, fields.n, bool(fields.stream), usage, fields.logprobs, request)

    def _prompts(self, value: Any) -> tuple[tuple[tuple[int, ...], ...], bool]:
        """Return the token ids of each prompt, and whether the prompts were given as texts."""
        texts: list[Any] = value if isinstance(value, list) else [value or ""]
        if texts and all(isinstance(text, str) for text in texts):
            return tuple((self.tokenizer.bos, *self.tokenizer.encode(text)) for text in texts), True
        every: list[Any] = texts if texts and isinstance(texts[0], list) else [texts]
        for prompt in every:
            if not prompt:
                raise invalid("prompt", value, "contains an empty list", code="invalid_type")
            for token in prompt:
                if not 0 <= token < self.tokenizer.vocab_size:
                    raise invalid("prompt", token, f"is not a token id; ids are 0 to {self.tokenizer.vocab_size - 1}")
        return tuple(map(tuple, every)), False

    def _stop(self, value: str | list[str] | None) -> tuple[str, ...]:
        stops = [] if value is None else [value] if isinstance(value, str) else value
        if "" in stops or sum(map(len, stops)) > self.limits.stop_characters:
            must = f"must not contain empty strings or exceed {self.limits.stop_characters} characters in total"
            raise invalid("stop", value, must)
        return tuple(stops)

    def _require_room(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        longest, most = max(map(len, prompts)), self.limits.prompt_tokens or self.context
        if longest > most:
            code = "context_length_exceeded" if most == self.context else "prompt_too_long"
            message = f"a prompt has {longest} tokens, but at most {most} are allowed"
            raise ApiError(400, message, param="prompt", code=code)
        excess = longest + max_tokens - self.context
        if excess > 0:
            message = f"a prompt of {longest} tokens and {max_tokens=} exceed the context of {self.context} tokens"
            raise ApiError(400, f"{message} by {excess}", param="max_tokens", code="context_length_exceeded")


def require_model(model: str, name: str) -> None:
    """Raise ApiError (404) if `model` is not the name of the server's model."""
    if model != name:
        message = f"the model {shown(model)} does not exist; this server serves {name}"
        raise ApiError(404, message, param="model", code="model_not_found")


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body. Raises ApiError (400) for anything else, including NaN and Infinity."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise ApiError(400, f"the body is not JSON: {reason}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")


class Answer:
    """The response to a completion request, whole or in chunks."""

    def __init__(self, asked: Completion, tokenizer: Tokenizer) -> None:
        self.asked = asked
        key, now = f"cmpl-{secrets.token_hex(12)}", int(time.time())
        self.head = {"id": key, "object": "text_completion", "created": now, "model": asked.model}
        self.choices = [Choice(index, asked, tokenizer) for index in range(len(asked.prompts) * asked.n)]

    def body(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return self.head | {"choices": list(choices)}

    def usage(self) -> dict[str, int]:
        """Return the token counts. Each prompt is counted once, however many texts continue it. BOS is counted too."""
        read, written = sum(map(len, self.asked.prompts)), sum(choice.written for choice in self.choices)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


class Choice:
    """One text of a response, with its tokens, their logprobs, and their offsets in the text.

    A token that does not consist of whole characters is named "bytes:\\x…", as in OpenAI's API. If a stop string ended
    the text, the tokens of the stop string are listed too.
    """

    def __init__(self, index: int, asked: Completion, tokenizer: Tokenizer) -> None:
        self.index, self.asked, self.tokenizer = index, asked, tokenizer
        self.written = 0
        self._hidden = asked.opened and asked.request.echo  # drop the BOS step before the prompt
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters decoded so far, including those of a stop string

    def piece(self, steps: Sequence[Step], finished: bool) -> dict[str, Any]:
        """Return everything generated since the previous piece as one of the choices in a response."""
        if self._hidden and steps:
            steps, self._hidden = steps[1:], False
        self.written += sum(not step.echoed for step in steps)
        text = "".join(step.text for step in steps)
        finish = (steps[-1].finish if steps else None) or ("length" if finished else None)
        logprobs = None if self.asked.logprobs is None else self._logprobs(steps)
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, steps: Sequence[Step]) -> dict[str, Any]:
        return {
            "tokens": [self._name(step.token) for step in steps],
            "token_logprobs": [step.logprob for step in steps],
            "top_logprobs": [self._top(step) for step in steps],
            "text_offset": [self._place(step.token) for step in steps],
        }

    def _place(self, token: int) -> int:
        """Return the offset in the text at which the next token starts. A split character belongs to its last token."""
        start, opens = self._offset, token == self.tokenizer.bos
        content = b"" if opens else self.tokenizer.decode_bytes([token])
        self._offset += len(self._decoder.decode(content, final=opens))
        own = self._own(token)
        return start if own is None else self._offset - len(own)

    def _top(self, step: Step) -> dict[str, float] | None:
        """Return the logprobs of the likeliest tokens and of the chosen token."""
        if step.logprob is None:
            return None
        return {self._name(token): logprob for token, logprob in step.top} | {self._name(step.token): step.logprob}

    def _name(self, token: int) -> str:
        if token == self.tokenizer.bos:
            return BOS
        own = self._own(token)
        content = self.tokenizer.decode_bytes([token])
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content) if own is None else own

    def _own(self, token: int) -> str | None:
        """Return a token's characters, or None if it does not consist of whole characters."""
        if token == self.tokenizer.bos:
            return ""
        try:
            return self.tokenizer.decode_bytes([token]).decode("utf-8")
        except UnicodeDecodeError:
            return None


def model_body(model: str, created: int) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": created, "owned_by": "expert-threshold"}

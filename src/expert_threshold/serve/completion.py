"""Requests, responses and errors of /v1/completions, in OpenAI's format, and the limits of a request.

Unknown fields are rejected, as OpenAI does. OpenAI's fields that this server does not support (`best_of`,
`logit_bias`, `presence_penalty`, …) are rejected unless they hold their neutral value. null means the default. Two
fields are ours: `top_k`, and `rate`, routed experts per token in this request's texts.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..data import Tokenizer
from ..data.tokenizer import BOS
from ..generate.engine import Request, Step, Text, ending
from ..option import Count, Positive, option, require_valid

MAX_TOKENS = 16
"""max_tokens of a request that gives none, or the most it may ask for; OpenAI's default."""

SEEDS = 2**63
IDLE: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "ignore_eos": (False,),
}
"""Fields of OpenAI and vLLM that are not supported, with the neutral values that are accepted."""


class ApiError(Exception):
    """An error for the client: HTTP status, message, the field at fault, and a machine-readable code.

    headers: pairs, since a header may come twice. retry: seconds after which the client should retry.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Iterable[tuple[str, str]] = (),
        retry: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = (*headers, *([] if retry is None else [("Retry-After", str(retry))]))

    @property
    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, "invalid_request_error")
        kind = "server_error" if self.status >= 500 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid(name: str, value: object, must: str, *, code: str | None = None) -> ApiError:
    """Return a 400 error for a field, with its name, its value and the requirement."""
    return ApiError(400, f"{name}={shown(value)} {must}", param=name, code=code)


def shown(value: object) -> str:
    """Return a client's value for an error message, truncated if it is long."""
    try:
        text = ascii(value)
    except RecursionError:
        return "…"
    return text if len(text) <= 60 else f"{text[:60]}…"


@dataclass(frozen=True)
class Limits:
    """Limits on one request and on all of them together. Each is at least 1, seconds above 0.

    None: only the context limits it.
    """

    body_bytes: Count = option(64 * 1024, "Maximum size of a request body in bytes.")
    prompt_tokens: Count | None = option(None, "Tokens in a prompt. Defaults to the full context.")
    output_tokens: Count | None = option(None, "Tokens to generate per text. Defaults to the full context.")
    n: Count = option(8, "Texts per prompt, the field n.")
    texts: Count = option(32, "Texts per request: its prompts times n.")
    logprobs: Count = option(20, "Likeliest tokens reported at each position, the field logprobs.")
    stop_characters: Count = option(4096, "Characters in all stop strings of a request together.")
    queue: Count = option(64, "Texts that may wait for a row of the batch; more are rejected with 429.")
    seconds: Positive = option(300.0, "Seconds that a request may take, including its wait; then it ends with 503.")
    body_seconds: Positive = option(10.0, "Seconds that a request's body may take to arrive; then it ends with 408.")
    header_seconds: Positive = option(
        10.0, "Seconds that a request's headers may take to arrive; then the connection is closed."
    )
    unfinished: Count = option(
        64, "Connections per address without a complete request; beyond that the oldest is closed."
    )

    def __post_init__(self) -> None:
        """Raise ValueError for a limit that lets nothing through."""
        require_valid(Limits, vars(self))


class Range(NamedTuple):
    """The numbers that a field takes. default: the value of a field that is absent or null."""

    kind: type[int] | type[float]
    least: float
    most: float
    default: float | None = None


def ranges(limits: Limits, context: int, dial: float | None) -> dict[str, Range]:
    """Return the ranges of all fields that are numbers. dial: the largest rate; None where the rate is fixed."""
    most = min(limits.output_tokens or context, context)
    found = {
        "n": Range(int, 1, limits.n, 1),
        "max_tokens": Range(int, 0, most, min(MAX_TOKENS, most)),
        "temperature": Range(float, 0, 2, 1),
        "top_p": Range(float, 0, 1, 1),
        "top_k": Range(int, 1, SEEDS - 1),
        "seed": Range(int, -SEEDS, SEEDS - 1),
        "logprobs": Range(int, 0, limits.logprobs),
    }
    return found if dial is None else found | {"rate": Range(float, 0, dial)}


class Completion(NamedTuple):
    """A validated request. prompts: token ids. opened: True if the prompts are texts, each of which begins with BOS."""

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
        """Return n requests for each prompt; the i-th of a prompt takes the seed plus i."""
        return [
            self.request._replace(prompt=prompt, seed=_shift(self.request.seed, i))
            for prompt in self.prompts
            for i in range(self.n)
        ]


def _shift(seed: int | None, by: int) -> int | None:
    return None if seed is None else (seed + by) % SEEDS


class Parser:
    """Parses request bodies. Whatever is wrong with a body raises an ApiError with a status below 500.

    dial: as in `ranges`.
    """

    def __init__(
        self, tokenizer: Tokenizer, context: int, models: Sequence[str], limits: Limits, dial: float | None = None
    ) -> None:
        self.tokenizer, self.context, self.models, self.limits = tokenizer, context, models, limits
        self.ranges = ranges(limits, context, dial)

    def __call__(self, body: bytes) -> Completion:
        fields = Fields(read_object(body))
        limits = self.limits
        model = self._model(fields)
        prompts, opened = self._prompts(fields)
        numbers = {name: fields.number(name, allowed) for name, allowed in self.ranges.items()}
        n, max_tokens, top_p = numbers["n"], numbers["max_tokens"], numbers["top_p"]
        if len(prompts) * n > limits.texts:
            message = f"prompts × n = {len(prompts)} × {n} texts; a request may ask for at most {limits.texts}"
            raise ApiError(400, message, param="n" if len(prompts) <= limits.texts else "prompt", code="too_many_texts")
        request = Request(
            prompt=(),
            max_tokens=max_tokens,
            temperature=numbers["temperature"] if top_p > 0 else 0.0,  # top_p=0 keeps only the likeliest token
            top_k=numbers["top_k"],
            top_p=top_p or 1.0,
            seed=_shift(numbers["seed"], 0),
            stop=self._stop(fields),
            tops=numbers["logprobs"] or 0,
            echo=fields.flag("echo"),
            rate=numbers.get("rate"),
        )
        stream = fields.flag("stream")
        include_usage = self._include_usage(fields, stream)
        if "rate" not in self.ranges and (rate := fields.take("rate")) is not None:
            must = "is not supported by this model, which has no cutoffs or no sketch of its scores; leave it out"
            raise invalid("rate", rate, must, code="unsupported")
        for name, idle in (IDLE | {"best_of": (1, n)}).items():
            value = fields.take(name)
            neutral = value in idle and isinstance(value, bool) == isinstance(idle[0], bool)
            if value is not None and not neutral:
                raise invalid(
                    name, value, f"is not supported; leave it out or give {json.dumps(idle[0])}", code="unsupported"
                )
        if not isinstance(fields.take("user"), str | None):
            raise ApiError(400, "user must be a string", param="user", code="invalid_type")
        fields.require_no_more()
        self._require_room(prompts, max_tokens)
        return Completion(model, prompts, opened, n, stream, include_usage, numbers["logprobs"], request)

    def _model(self, fields: Fields) -> str:
        model = fields.take("model")
        if not isinstance(model, str):
            raise invalid("model", model, f"must be a string, such as {self.models[0]!r}", code="invalid_type")
        require_model(model, self.models)
        return model

    def _prompts(self, fields: Fields) -> tuple[tuple[tuple[int, ...], ...], bool]:
        """Return the token ids of each prompt, and True if the prompts were texts."""
        value = fields.take("prompt")
        value = "" if value is None else value
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list) or not value:
            raise _not_a_prompt(value)
        if all(type(item) is int for item in value):
            value = [value]
        if all(isinstance(item, str) for item in value):
            return tuple((self.tokenizer.bos, *self.tokenizer.encode(text)) for text in value), True
        for item in value:
            if not isinstance(item, list) or not item or any(type(token) is not int for token in item):
                raise _not_a_prompt(item)
            for token in item:
                if not 0 <= token < self.tokenizer.vocab_size:
                    raise invalid("prompt", token, f"is no token id; they are 0 to {self.tokenizer.vocab_size - 1}")
        return tuple(map(tuple, value)), False

    def _stop(self, fields: Fields) -> tuple[str, ...]:
        value = fields.take("stop")
        stops = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise invalid("stop", value, "must be a string or a list of strings", code="invalid_type")
        if "" in stops or sum(map(len, stops)) > self.limits.stop_characters:
            raise invalid(
                "stop", value, f"must not be empty, nor have over {self.limits.stop_characters} characters in all"
            )
        return tuple(stops)

    def _include_usage(self, fields: Fields, stream: bool) -> bool:
        value = fields.take("stream_options")
        if value is None:
            return False
        if not isinstance(value, dict):
            raise invalid("stream_options", value, "must be an object", code="invalid_type")
        if not stream:
            raise invalid("stream_options", value, "needs stream=true")
        options = Fields(value, "stream_options.")
        include_usage = options.flag("include_usage")
        for name in ("include_obfuscation", "continuous_usage_stats"):
            if options.flag(name):
                raise invalid(f"stream_options.{name}", True, "is not supported; leave it out or give false")
        options.require_no_more()
        return include_usage

    def _require_room(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        longest = max(map(len, prompts))
        most = self.limits.prompt_tokens or self.context
        if longest > most:
            raise ApiError(
                400,
                f"a prompt has {longest} tokens; at most {most} are allowed",
                param="prompt",
                code="context_length_exceeded" if most == self.context else "prompt_too_long",
            )
        if longest + max_tokens > self.context:
            raise ApiError(
                400,
                f"the context is {self.context} tokens; a prompt has {longest} and max_tokens={max_tokens} asks for "
                f"{longest + max_tokens - self.context} too many",
                param="max_tokens",
                code="context_length_exceeded",
            )


def require_model(model: str, models: Sequence[str]) -> None:
    """Raise ApiError 404 unless this server has the model."""
    if model not in models:
        message = f"the model {shown(model)} does not exist; this server has {', '.join(models)}"
        raise ApiError(404, message, param="model", code="model_not_found")


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body; rejects NaN and Infinity, which JSON does not have."""
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


def _not_a_prompt(value: object) -> ApiError:
    must = "must be a string, a list of strings, a list of token ids, or a list of those; none may be an empty list"
    return invalid("prompt", value, must, code="invalid_type")


class Fields:
    """Takes the fields of an object one by one; absent and null mean the default."""

    def __init__(self, fields: dict[str, Any], prefix: str = "") -> None:
        self._left, self._prefix = dict(fields), prefix

    def take(self, name: str) -> Any:
        return self._left.pop(name, None)

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise invalid(self._prefix + name, value, "must be true or false", code="invalid_type")
        return bool(value)

    def number(self, name: str, allowed: Range) -> Any:
        """Return a number of the allowed kind and range, or the default."""
        value = self.take(name)
        if value is None:
            return allowed.default
        if isinstance(value, bool) or not isinstance(value, int | allowed.kind):
            must = "must be a whole number" if allowed.kind is int else "must be a number"
            raise invalid(name, value, must, code="invalid_type")
        if not allowed.least <= value <= allowed.most:
            raise invalid(name, value, f"must be from {allowed.least} to {allowed.most}", code="out_of_range")
        return allowed.kind(value)

    def require_no_more(self) -> None:
        for name in self._left:
            message = f"unknown field {shown(self._prefix + name)}"
            raise ApiError(400, message, param=self._prefix + name[:60], code="unknown_field")


class Answer:
    """The response to a completion, whole or in chunks."""

    def __init__(self, asked: Completion, tokenizer: Tokenizer) -> None:
        self.asked, self.tokenizer = asked, tokenizer
        self.head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": asked.model,
        }
        self.choices = [Choice(index, asked, tokenizer) for index in range(len(asked.prompts) * asked.n)]

    def body(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return self.head | {"choices": list(choices)}

    def usage(self) -> dict[str, int]:
        """Return token counts. A prompt counts once, however many texts continue it; BOS counts."""
        read, written = sum(map(len, self.asked.prompts)), sum(choice.written for choice in self.choices)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


class Choice:
    """One text of a response, with its tokens, their logprobs, and their offsets in the text.

    A token that is not whole characters is named "bytes:\\x…", as by OpenAI. Where a stop string ended a text, all of
    its tokens are listed, those of the stop string too.
    """

    def __init__(self, index: int, asked: Completion, tokenizer: Tokenizer) -> None:
        self.index, self.asked, self.tokenizer = index, asked, tokenizer
        self.written = 0
        self._hidden = asked.opened and asked.request.echo  # drop the BOS step before the prompt
        self._offset = 0
        after = ending(tokenizer, asked.requests[index])
        self._text = Text((), after)  # the generated text, as if no stop string had ended it

    def piece(self, prompt: Sequence[Step], steps: Sequence[Step], finished: bool) -> dict[str, Any]:
        """Return what was generated since the last piece, as one of the response's choices."""
        if self._hidden and prompt:
            prompt, self._hidden = prompt[1:], False
        self.written += len(steps)
        text = "".join(step.text for step in (*prompt, *steps))
        finish = steps[-1].finish if steps else "length" if finished else None
        logprobs = None if self.asked.logprobs is None else self._logprobs(prompt, steps)
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, prompt: Sequence[Step], steps: Sequence[Step]) -> dict[str, Any]:
        offsets = [self._place(step.token, len(step.text)) for step in prompt]
        for step in steps:
            content = b"" if step.token == self.tokenizer.bos else self.tokenizer.decode_bytes([step.token])
            offsets.append(self._place(step.token, len(self._text.push(content, final=False)[0])))
        every = [*prompt, *steps]
        return {
            "tokens": [self._name(step.token) for step in every],
            "token_logprobs": [step.logprob for step in every],
            "top_logprobs": [self._top(step) for step in every],
            "text_offset": offsets,
        }

    def _place(self, token: int, characters: int) -> int:
        """Return the offset at which a token begins, after advancing by the characters that it completes."""
        start, self._offset = self._offset, self._offset + characters
        own = self._own(token)
        return start if own is None else self._offset - len(own)

    def _top(self, step: Step) -> dict[str, float] | None:
        """Return the logprobs of the likeliest tokens and of the one chosen."""
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
        """Return a token's characters; None if it holds only part of one."""
        if token == self.tokenizer.bos:
            return ""
        try:
            return self.tokenizer.decode_bytes([token]).decode("utf-8")
        except UnicodeDecodeError:
            return None


def model_body(model: str, created: int) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": created, "owned_by": "expert-threshold"}

"""The HTTP API as an OpenAPI document, with this server's limits."""

from __future__ import annotations

from typing import Any

from .. import __version__
from .completion import IDLE, Limits, Range, ranges

Schema = dict[str, Any]


def schema(model: str, limits: Limits, context: int, vocab_size: int, dial: float | None) -> Schema:
    paths = {
        "/health": {"get": _operation("Health check", {"200": _json({"type": "object"})}, "503")},
        "/metrics": {"get": _operation("Metrics for Prometheus", {"200": _content("text/plain", {"type": "string"})})},
        "/openapi.json": {"get": _operation("This document", {"200": _json({"type": "object"})})},
        "/v1/models": {"get": _operation("The models of this server", {"200": _json(_MODELS)})},
        "/v1/models/{model}": {
            "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}],
            "get": _operation("A model", {"200": _json(_ref("Model"))}, "404"),
        },
        "/v1/completions": {"post": _completions()},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "expert-threshold", "version": __version__},
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {
                "Error": _ERROR,
                "Model": _MODEL,
                "Completion": _COMPLETION,
                "Request": request_schema(model, limits, context, vocab_size, dial),
            },
        },
    }


def _operation(summary: str, responses: Schema, *errors: str) -> Schema:
    refusals = {status: _json(_ref("Error")) for status in ("401", "403", *errors)}
    return {"summary": summary, "responses": responses | refusals, "security": [{}, {"key": []}]}


def _completions() -> Schema:
    whole, events = _json(_ref("Completion")), _content("text/event-stream", {})
    done = whole | {"content": whole["content"] | events["content"]}
    operation = _operation("Continue texts", {"200": done}, "400", "404", "408", "413", "415", "429", "500", "503")
    return operation | {"requestBody": {"required": True, "content": _json(_ref("Request"))["content"]}}


def request_schema(model: str, limits: Limits, context: int, vocab_size: int, dial: float | None) -> Schema:
    """Return the schema of a completion request. It omits the limits on prompts times n and on their tokens."""
    ids = _list_of({"type": "integer", "minimum": 0, "maximum": vocab_size - 1}) | {"minItems": 1}
    texts = {"minItems": 1, "maxItems": limits.texts}
    stop = {"type": "string", "minLength": 1, "maxLength": limits.stop_characters}
    flag = {"type": ["boolean", "null"]}
    properties: Schema = {
        "model": {"type": "string", "enum": [model]},
        "prompt": {
            "anyOf": [
                {"type": ["string", "null"]},
                _list_of({"type": "string"}) | texts,
                ids,
                _list_of(ids) | texts,
            ]
        },
        "stream": flag,
        "stream_options": {
            "type": ["object", "null"],
            "properties": {"include_usage": flag, "include_obfuscation": {"enum": [False, None]}},
            "additionalProperties": False,
        },
        "echo": flag,
        "stop": {"anyOf": [stop, {"type": "null"}, _list_of(stop)]},
        "rate": {"type": "null"},  # unless it has a range
        "user": {"type": ["string", "null"]},
        "best_of": {"type": ["integer", "null"], "description": "1, or the value of n."},
        **{name: {"enum": [*values, None]} for name, values in IDLE.items()},
        **{name: _number(allowed) for name, allowed in ranges(limits, context, dial).items()},
    }
    properties["n"]["maximum"] = min(limits.n, limits.texts)
    return {"type": "object", "required": ["model"], "properties": properties, "additionalProperties": False}


def _number(allowed: Range) -> Schema:
    kind = "integer" if allowed.kind is int else "number"
    return {
        "type": [kind, "null"],
        "minimum": allowed.least,
        "maximum": allowed.most,
        "default": allowed.default,
    }


def _list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(content: Schema) -> Schema:
    return _content("application/json", content)


def _content(kind: str, content: Schema) -> Schema:
    return {"description": "", "content": {kind: {"schema": content}}}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


_TEXT, _WHOLE = {"type": "string"}, {"type": "integer"}
_NUMBERS = {"type": ["number", "null"]}
_ERROR = _object(
    error=_object(message=_TEXT, type=_TEXT, param={"type": ["string", "null"]}, code={"type": ["string", "null"]})
)
_MODEL = _object(id=_TEXT, object={"const": "model"}, created=_WHOLE, owned_by=_TEXT)
_MODELS = _object(object={"const": "list"}, data=_list_of(_ref("Model")))
_LOGPROBS = _object(
    tokens=_list_of(_TEXT),
    token_logprobs=_list_of(_NUMBERS),
    top_logprobs=_list_of({"type": ["object", "null"], "additionalProperties": {"type": "number"}}),
    text_offset=_list_of(_WHOLE),
)
_CHOICE = _object(
    index=_WHOLE,
    text=_TEXT,
    logprobs=_LOGPROBS | {"type": ["object", "null"]},
    finish_reason={"enum": ["stop", "length", None]},
)
_COMPLETION = _object(
    id=_TEXT,
    object={"const": "text_completion"},
    created=_WHOLE,
    model=_TEXT,
    choices=_list_of(_CHOICE),
    usage=_object(prompt_tokens=_WHOLE, completion_tokens=_WHOLE, total_tokens=_WHOLE),
)

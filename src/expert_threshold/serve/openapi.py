"""The HTTP API as an OpenAPI document: its routes, and the fields of a request with this server's limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import __version__
from .completion import IDLE, Limits, Range, ranges

Schema = dict[str, Any]
JSON = "application/json"


def schema(model: str, limits: Limits, context: int, vocab_size: int, dial: float | None) -> Schema:
    paths = {
        "/health": {"get": _operation("Health check", "503")},
        "/metrics": {"get": _operation("Metrics for Prometheus", kinds=("text/plain",))},
        "/openapi.json": {"get": _operation("This document")},
        "/v1/models": {"get": _operation("The models of this server")},
        "/v1/models/{model}": {
            "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}],
            "get": _operation("A model", "404"),
        },
        "/v1/completions": {"post": _completions()},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "expert-threshold", "version": __version__},
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Request": request_schema(model, limits, context, vocab_size, dial)},
        },
    }


def _operation(summary: str, *errors: str, kinds: Sequence[str] = (JSON,)) -> Schema:
    """Return a description of a route: the media types of its response, and the statuses of its errors."""
    answers = {"200": {"description": "", "content": {kind: {} for kind in kinds}}}
    refusals = {status: {"description": "", "content": {JSON: {}}} for status in ("401", "403", *errors)}
    return {"summary": summary, "responses": answers | refusals, "security": [{}, {"key": []}]}


def _completions() -> Schema:
    errors = ("400", "404", "408", "413", "415", "429", "500", "503")
    body = {"required": True, "content": {JSON: {"schema": {"$ref": "#/components/schemas/Request"}}}}
    return _operation("Continue texts", *errors, kinds=(JSON, "text/event-stream")) | {"requestBody": body}


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

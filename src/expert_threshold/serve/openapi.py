"""Describes the HTTP API as an OpenAPI document: its routes, and the request fields with this server's limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from .. import __version__

Schema = dict[str, Any]
JSON = "application/json"


def schema(request: type[BaseModel]) -> Schema:
    """Return a server's OpenAPI document. request: the pydantic model for its completion requests."""
    fields = request.model_json_schema(ref_template="#/components/schemas/{model}")
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
            "schemas": {**fields.pop("$defs"), request.__name__: fields},
        },
    }


def _operation(summary: str, *errors: str, kinds: Sequence[str] = (JSON,)) -> Schema:
    """Describe a route. errors: its statuses besides 401 and 403. kinds: the media types of the response."""
    answers = {"200": {"description": "", "content": {kind: {} for kind in kinds}}}
    refusals = {status: {"description": "", "content": {JSON: {}}} for status in ("401", "403", *errors)}
    return {"summary": summary, "responses": answers | refusals, "security": [{}, {"key": []}]}


def _completions() -> Schema:
    errors = ("400", "404", "408", "413", "415", "429", "500", "503")
    body = {"required": True, "content": {JSON: {"schema": {"$ref": "#/components/schemas/CompletionRequest"}}}}
    return _operation("Continue texts", *errors, kinds=(JSON, "text/event-stream")) | {"requestBody": body}

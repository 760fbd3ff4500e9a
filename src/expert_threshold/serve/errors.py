"""Errors in the format of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    """An error for the client: HTTP status, message, the field at fault, and a machine-readable code.

    retry: seconds after which the client should retry.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers: Mapping[str, str] = {} if retry is None else {"Retry-After": str(retry)}

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

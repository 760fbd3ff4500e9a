"""Limits on what one request, and all of them together, may ask for."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..option import option


@dataclass(frozen=True)
class Limits:
    """Each is at least 1, seconds above 0. None: only the context limits it."""

    body_bytes: int = option(64 * 1024, "Maximum size of a request body in bytes.")
    prompt_tokens: int | None = option(None, "Tokens in a prompt; none is as many as fit in the context.")
    output_tokens: int | None = option(None, "Tokens to generate per text; none is as many as fit in the context.")
    n: int = option(8, "Texts per prompt, the field n.")
    texts: int = option(32, "Texts per request: its prompts times n.")
    logprobs: int = option(20, "Likeliest tokens reported at each position, the field logprobs.")
    stops: int = option(8, "Stop strings.")
    stop_characters: int = option(128, "Characters in a stop string.")
    queue: int = option(64, "Texts that may wait for a row of the batch; more are rejected with 429.")
    seconds: float = option(300.0, "Seconds that a request may take, including its wait; then it ends with 503.")
    body_seconds: float = option(10.0, "Seconds that a request's body may take to arrive; then it ends with 408.")
    header_seconds: float = option(
        10.0, "Seconds that a request's headers may take to arrive; then the connection is closed."
    )
    unfinished: int = option(
        64, "Connections per address without a complete request; beyond that the oldest is closed."
    )

    def __post_init__(self) -> None:
        """Raise ValueError, naming the flag of `et serve`, for a limit that lets nothing through."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or (value >= 1 if isinstance(value, int) else value > 0):
                continue
            least = "at least 1" if isinstance(value, int) else "above 0"
            raise ValueError(f"--max-{field.name.replace('_', '-')} {value} must be {least}; see et serve --help")

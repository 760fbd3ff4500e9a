"""Limits on what one request, and all of them together, may ask for."""

from __future__ import annotations

from dataclasses import dataclass

from ..option import Count, Positive, option, require_valid


@dataclass(frozen=True)
class Limits:
    """Each is at least 1, seconds above 0. None: only the context limits it."""

    body_bytes: Count = option(64 * 1024, "Maximum size of a request body in bytes.")
    prompt_tokens: Count | None = option(None, "Tokens in a prompt; none is as many as fit in the context.")
    output_tokens: Count | None = option(None, "Tokens to generate per text; none is as many as fit in the context.")
    n: Count = option(8, "Texts per prompt, the field n.")
    texts: Count = option(32, "Texts per request: its prompts times n.")
    logprobs: Count = option(20, "Likeliest tokens reported at each position, the field logprobs.")
    stops: Count = option(8, "Stop strings.")
    stop_characters: Count = option(128, "Characters in a stop string.")
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

"""How much one request, and all of them together, may ask for."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..option import option


@dataclass(frozen=True)
class Limits:
    """Each is at least 1. None: the context alone limits it."""

    body_bytes: int = option(64 * 1024, "Bytes of a request's body.")
    prompt_tokens: int | None = option(None, "Tokens of a prompt; none is as many as the context has room for.")
    output_tokens: int | None = option(None, "Tokens to write per text; none is as many as the context has room for.")
    n: int = option(8, "Texts per prompt, the field n.")
    texts: int = option(32, "Texts per request: its prompts times n.")
    logprobs: int = option(20, "Likeliest tokens told at each place, the field logprobs.")
    stops: int = option(8, "Stop strings.")
    stop_characters: int = option(128, "Characters of a stop string.")
    queue: int = option(64, "Texts that wait for a row of the batch; more are refused with 429.")
    seconds: float = option(300.0, "Seconds that a request may take, its wait included; then it ends with 503.")
    body_seconds: float = option(10.0, "Seconds that a request's body may take to arrive; then it ends with 408.")
    header_seconds: float = option(
        10.0, "Seconds that a request's headers may take to arrive; then the connection is closed."
    )
    unfinished: int = option(
        64, "Connections of one address that have sent no whole request; of more the oldest is closed."
    )

    def __post_init__(self) -> None:
        """Raises ValueError, in terms of `et serve`, for a limit that lets nothing through."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or (value >= 1 if isinstance(value, int) else value > 0):
                continue
            least = "at least 1" if isinstance(value, int) else "above 0"
            raise ValueError(f"--max-{field.name.replace('_', '-')} {value} must be {least}; see et serve --help")

"""How much one request, and all of them together, may ask for."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Limits:
    """Each is at least 1. None: the context alone limits it."""

    # Bytes of a request's body.
    body_bytes: int = 64 * 1024
    # Tokens of a prompt; none is as many as the context has room for.
    prompt_tokens: int | None = None
    # Tokens to write per text; none is as many as the context has room for.
    output_tokens: int | None = None
    # Texts per prompt, the field n.
    n: int = 8
    # Texts per request: its prompts times n.
    texts: int = 32
    # Likeliest tokens told at each place, the field logprobs.
    logprobs: int = 20
    # Stop strings.
    stops: int = 8
    # Characters of a stop string.
    stop_characters: int = 128
    # Texts that wait for a row of the batch; more are refused with 429.
    queue: int = 64
    # Seconds that a request may take, its wait included; then it ends with 503.
    seconds: float = 300.0
    # Seconds that a request's body may take to arrive; then it ends with 408.
    body_seconds: float = 10.0
    # Seconds that a request's headers may take to arrive; then the connection is closed.
    header_seconds: float = 10.0
    # Connections of one address that have sent no whole request; of more the oldest is closed.
    unfinished: int = 64

    def __post_init__(self) -> None:
        """Raises ValueError, in terms of `et serve`, for a limit that lets nothing through."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or (value >= 1 if isinstance(value, int) else value > 0):
                continue
            least = "at least 1" if isinstance(value, int) else "above 0"
            raise ValueError(f"--max-{field.name.replace('_', '-')} {value} must be {least}; see et serve --help")

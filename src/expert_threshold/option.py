"""Options of configuration records: dataclass fields that carry their own help."""

from __future__ import annotations

from dataclasses import field
from typing import TypeVar

T = TypeVar("T")


def option(default: T, help: str) -> T:
    """Return a dataclass field with this default; command lines show `help`, one or two sentences, in `--help`."""
    return field(default=default, metadata={"help": help})

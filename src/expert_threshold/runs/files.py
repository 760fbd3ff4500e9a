"""Files that are either whole or absent: written beside their place, flushed to the disk, then renamed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def to_json(value: Mapping[str, Any], indent: int | None = None) -> str:
    """Strict JSON, which has no NaN and no infinity: `ValueError` if `value` holds one. Floats survive exactly."""
    return json.dumps(value, indent=indent, allow_nan=False)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Anything else reads as an empty one, which no check of a format lets pass."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


@contextmanager
def damage_told(name: str | Path, remedy: str) -> Iterator[None]:
    """What a record lacks, or has of another kind than is read of it, is told as damage of `name`: `ValueError`."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{name}: damaged ({reason}); {remedy}") from error


def sync_folder(path: Path) -> None:
    """Flushes the folder's list of names to the disk, without which a rename does not outlive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Adds the path to an `OSError` that has none: a write that fails does not say where."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_synced(path: Path, content: bytes) -> None:
    with named(path), path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write that becomes `path`, unless an error leaves the old one: readers see one of them, and whole.

    A link stays one: what it leads to is replaced.
    """
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with named(path):
            yield temporary
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def replace_file(path: Path, content: bytes) -> None:
    """Writes `path` so that its readers, at any time, see the old content or the new; `OSError` leaves the old."""
    with replacing(path) as temporary:
        write_synced(temporary, content)

"""Writes files and folders atomically: next to their destination first, then flushed to disk, then renamed."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

TEMPORARY = ".tmp-"
"""The prefix in the names of files and folders that are not complete yet."""


def expand(path: str | Path) -> Path:
    """Expand ~ and ~user. Unlike `Path.expanduser`, return the path unchanged if there is no such home folder."""
    return Path(os.path.expanduser(path))


def to_json(value: Mapping[str, Any], indent: int | None = None) -> str:
    """Return strict JSON that preserves floats exactly. Raises ValueError for NaN and infinity, which JSON forbids."""
    return json.dumps(value, indent=indent, allow_nan=False)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`. Any other content yields an empty object, which fails every format check."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


@contextmanager
def corrupted_file_error(name: str | Path, remedy: str) -> Iterator[None]:
    """Convert errors about missing or malformed fields to a ValueError, which says that `name` is damaged."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"it contains no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{name} is damaged ({reason}); {remedy}") from error


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Make an OSError name `path` if it names a temporary file or, as after a failed write, no file at all."""
    try:
        yield
    except OSError as error:
        if error.filename is None or Path(os.fsdecode(error.filename)).name.startswith(TEMPORARY):
            error.filename = str(path)
        raise


def sync_folder(path: Path) -> None:
    """Flush the folder's entries to disk. Otherwise, a rename in it may not survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with named(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, content: bytes) -> None:
    with named(path), path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces `path` unless an error occurs.

    Readers see either the whole old file or the whole new one. If `path` is a link, its target is replaced.
    """
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")  # other processes may write it, too
    try:
        with named(path):
            yield temporary
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def require_free(to: str | Path, option: str = "--to") -> None:
    """Raise ValueError, naming the option, if `to` exists and is not an empty folder. Nothing is ever overwritten.

    The working directory is rejected even if it is empty, since replacing it would leave a shell in the old folder.
    """
    path = Path(to)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{option} {to} already exists; name another folder")
    if path.exists() and path.samefile(Path()):
        raise ValueError(f"{option} {to} is the working directory; name a new folder inside it")


def missing_folders(path: Path) -> list[Path]:
    """Return the folders that must be created for `path` to exist, innermost first."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders, innermost first, until one is not empty."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


@contextmanager
def new_folder(to: str | Path, option: str = "--to") -> Iterator[Path]:
    """Yield a temporary folder, which becomes `to` unless an error occurs. Raises ValueError as `require_free` does."""
    require_free(to, option)
    place = Path(os.path.realpath(to))  # a link to an empty folder cannot be replaced, but its target can
    missing = missing_folders(place.parent)
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}{place.name}-", dir=place.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        os.replace(temporary, place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        remove_empty(missing)


def replace_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object like `replace_file`, indented so that people can read it."""
    replace_file(path, (to_json(content, indent=2) + "\n").encode())


def replace_file(path: Path, content: bytes) -> None:
    """Write `path` atomically: readers see the old or the new content, and an OSError leaves the old content."""
    with replacing(path) as temporary:
        write_synced(temporary, content)

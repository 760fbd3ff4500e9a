"""One trainer per run folder: a lock file that names its holder."""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .files import named

# Distinguishes this process from an earlier one with the same PID, as containers reuse PIDs at every start.
_PROCESS = uuid.uuid4().hex

LOCK = ".lock"
"""The lock file's name in the folder it locks. A killed process's lock does not count as content of the folder."""


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds the lock file `path`, taking over the lock of a dead process.

    Raises `ValueError` that names the holder if another trainer, even in this process, holds it.
    """
    claim = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "process": _PROCESS}).encode()
    while True:
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            break
        except FileExistsError:
            _remove_if_stale(path)
    try:
        with named(path), os.fdopen(descriptor, "wb") as file:
            file.write(claim)
        yield
    finally:
        path.unlink(missing_ok=True)


def _remove_if_stale(path: Path) -> None:
    """Removes a dead holder's lock. Raises `ValueError` if the holder lives or is on another machine."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    try:
        holder = json.loads(content)
        pid, host, process = int(holder["pid"]), str(holder["host"]), holder["process"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{path}: in use by another process; if none runs, delete this file") from None
    if host != socket.gethostname() or (_runs(pid) and (pid != os.getpid() or process == _PROCESS)):
        raise ValueError(
            f"{path.parent}: process {pid} on {host} is at work there; stop it first, or delete {path} if it is gone"
        )
    # Moved before it is removed: if two processes find the same dead holder, the slower one may move the faster one's
    # new lock, and must give it back.
    moved = path.with_name(f"{path.name}-{uuid.uuid4().hex}")
    try:
        os.rename(path, moved)
        if moved.read_bytes() != content:
            os.link(moved, path)
        moved.unlink()
    except (FileNotFoundError, FileExistsError):
        moved.unlink(missing_ok=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it runs, as another user
        return True
    return True


def is_vacant(folder: Path) -> bool:
    """Returns True if the folder is empty but for a lock."""
    return {path.name for path in folder.iterdir()} <= {LOCK}

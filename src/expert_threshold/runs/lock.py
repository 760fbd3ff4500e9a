"""Locks a folder for one process. If the process dies, the operating system releases the lock."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from ..files import TEMPORARY, named

LOCK = ".lock"
"""The name of the lock file in a locked folder. A file that a killed process left behind is ignored."""


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file `path`. Raises ValueError, naming the holder, if any process holds it, even this one."""
    with ExitStack() as stack:
        with named(path):
            file = _locked(path, stack)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            os.fsync(file.fileno())  # so that other machines see it on a network file system
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _locked(path: Path, stack: ExitStack) -> TextIO:
    """Return the opened and locked file, which the stack closes. Raises ValueError if it is already locked."""
    while True:
        file = stack.enter_context(path.open("a+", encoding="utf-8"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read() or "another process"
            raise ValueError(f"{path.parent} is in use by {holder}; stop it first") from None
        with suppress(FileNotFoundError):  # the previous holder may have removed the file after we had opened it
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return file


def is_vacant(folder: Path) -> bool:
    """Return True if the folder contains only what a killed process may leave behind: a lock and incomplete files."""
    return all(path.name == LOCK or path.name.startswith(TEMPORARY) for path in folder.iterdir())

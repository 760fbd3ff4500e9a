"""The folder that holds downloads."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ..files import expand

VARIABLE = "EXPERT_THRESHOLD_CACHE"


def cache_folder() -> Path:
    """Return the folder in EXPERT_THRESHOLD_CACHE, else expert-threshold in the user's cache.

    Raises ValueError if it is in a home folder, and there is none.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = expand(os.environ.get(VARIABLE) or f"{caches}/expert-threshold")
    if str(folder).startswith("~"):
        raise ValueError(f"no home folder for the cache, {folder}: name another cache in {VARIABLE}")
    return folder.absolute()


def require_writable(folder: Path, remedy: str = f"name another cache in {VARIABLE}") -> Path:
    """Return the folder, created if needed. Raises ValueError with the remedy if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"folder {folder} cannot be written ({error.strerror}): {remedy}") from None
    return folder

"""The folder that holds downloads."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

VARIABLE = "EXPERT_THRESHOLD_CACHE"


def cache_folder() -> Path:
    """Return the folder in EXPERT_THRESHOLD_CACHE, else expert-threshold in the user's cache."""
    if given := os.environ.get(VARIABLE):
        return Path(given).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "expert-threshold"


def require_writable(folder: Path, remedy: str = f"name another cache with --cache or {VARIABLE}") -> Path:
    """Return the folder, created if needed. Raises ValueError with the remedy if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"folder {folder} cannot be written ({error.strerror}): {remedy}") from None
    return folder

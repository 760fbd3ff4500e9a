"""Derives a run folder from another without training: weights alone, for use or as the start of a run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from .files import replace_json
from .folder import RunFolder


def require_free(to: str | Path, option: str = "--to") -> None:
    """Raise ValueError if the folder exists and is not empty: no run is ever overwritten."""
    path = Path(to)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{option} {to}: already exists; name another folder")


def derive(
    source: RunFolder,
    to: str | Path,
    step: int,
    weights: Mapping[str, Tensor],
    *,
    model: Mapping[str, Any],
    files: Mapping[str, Mapping[str, Any]] | None = None,
) -> RunFolder:
    """Write a run with the source's configuration and tokenizer but this model, atomically.

    model: its section of the configuration; files: further JSON objects by name. The source does not change. Raises
    ValueError if `to` is not empty, OSError if the disk is full.
    """
    require_free(to)
    to = Path(os.path.realpath(to))  # a link to an empty folder cannot be replaced, but its target can
    to.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".tmp-{to.name}-", dir=to.parent))
    try:
        run = RunFolder(temporary)
        run.write_config({**source.config, "model": dict(model), "init_from": str(source.path.resolve())})
        run.write_tokenizer(source.tokenizer())
        run.save_checkpoint(step, {"model": weights}, {})
        for name, content in (files or {}).items():
            replace_json(temporary / name, content)
        temporary.chmod(0o755)
        os.replace(temporary, to)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return RunFolder.open(to)

"""Derives a run folder from another without training: weights alone, for use or as the start of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..files import new_folder, replace_json
from .folder import RunFolder


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
    with new_folder(to) as temporary:
        run = RunFolder(temporary)
        run.write_config({**source.config, "model": dict(model), "init_from": str(source.path.resolve())})
        run.write_tokenizer(source.tokenizer())
        run.save_checkpoint(step, {"model": weights}, {})
        for name, content in (files or {}).items():
            replace_json(temporary / name, content)
    return RunFolder.open(to)

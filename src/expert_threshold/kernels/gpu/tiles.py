"""The fastest tiles measured on one GPU, read from the file that EXPERT_THRESHOLD_TILES names."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

VARIABLE = "EXPERT_THRESHOLD_TILES"
FORMAT = "expert-threshold tiles 1"

NAMES = {"tile_m", "tile_n", "num_warps", "num_stages"}
Tiles = dict[str, int]
"""The numbers of a launch, by NAMES."""


def measured_tiles(kernel: str, constants: Mapping[str, Any], device: torch.device) -> Tiles | None:
    """Return the tiles measured for a kernel with these constants on this GPU, or None, which leaves it to the tuner.

    Raises ValueError if the file cannot be read.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return None
    gpu, rows = _read(path)
    if gpu != torch.cuda.get_device_name(device):
        return None
    for row in rows:
        if row["kernel"] == kernel and all(constants.get(name) == value for name, value in row["constants"].items()):
            return dict(row["tiles"])
    return None


def write_tiles(path: Path, device: torch.device, rows: list[dict[str, Any]]) -> None:
    """Write rows of `kernel`, `constants` and `tiles`."""
    record = {"format": FORMAT, "gpu": torch.cuda.get_device_name(device), "tiles": rows}
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_text(json.dumps(record, indent=1), encoding="utf-8")
    temporary.replace(path)


@functools.cache
def _read(path: str) -> tuple[str, list[dict[str, Any]]]:
    try:
        record = json.loads(Path(path).read_bytes())
        if record["format"] != FORMAT:
            raise ValueError("another format")
        for row in record["tiles"]:
            if not (isinstance(row["kernel"], str) and isinstance(row["constants"], dict)):
                raise ValueError("a row without a kernel's name and its constants")
            if row["tiles"].keys() != NAMES or not all(type(n) is int and n > 0 for n in row["tiles"].values()):
                raise ValueError(f"tiles={row['tiles']} are not whole numbers above 0 for {', '.join(sorted(NAMES))}")
        return record["gpu"], record["tiles"]
    except (AttributeError, OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{VARIABLE}={path}: no file of tiles ({error}); measure anew, or unset it") from None

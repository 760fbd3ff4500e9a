"""Tiles that were measured, read from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from expert_threshold.kernels.gpu import tiles

CUDA = torch.device("cuda")
CONSTANTS = {"d_in": 768, "d_out": 1536, "gathered": True}
TILES = {"tile_m": 128, "tile_n": 256, "num_warps": 8, "num_stages": 3}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    path = tmp_path / "tiles.json"
    tiles.write_tiles(path, CUDA, [{"kernel": "multiply", "constants": CONSTANTS, "tiles": TILES}])
    monkeypatch.setenv(tiles.VARIABLE, str(path))
    tiles._read.cache_clear()
    return path


@pytest.mark.usefixtures("file")
def test_tiles_are_found_by_kernel_and_constants() -> None:
    assert tiles.measured_tiles("multiply", CONSTANTS | {"experts": 16}, CUDA) == TILES
    assert tiles.measured_tiles("multiply", CONSTANTS | {"d_in": 1280}, CUDA) is None
    assert tiles.measured_tiles("multiply_segments", CONSTANTS, CUDA) is None


@pytest.mark.usefixtures("file")
def test_tiles_of_another_gpu_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another card")
    assert tiles.measured_tiles("multiply", CONSTANTS, CUDA) is None


def test_without_the_variable_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tiles.VARIABLE, raising=False)
    assert tiles.measured_tiles("multiply", CONSTANTS, CUDA) is None


def of_rows(*rows: object) -> str:
    return json.dumps({"format": tiles.FORMAT, "gpu": "a card", "tiles": rows})


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        json.dumps({"format": "other"}),
        json.dumps({"format": tiles.FORMAT}),
        of_rows("multiply"),
        of_rows({"kernel": "multiply", "tiles": TILES}),
        of_rows({"kernel": "multiply", "constants": [], "tiles": TILES}),
        of_rows({"kernel": "multiply", "constants": {}, "tiles": 3}),
        of_rows({"kernel": "multiply", "constants": {}, "tiles": {"tile_m": 128}}),
        of_rows({"kernel": "multiply", "constants": {}, "tiles": TILES | {"num_warps": "8"}}),
        of_rows({"kernel": "multiply", "constants": {}, "tiles": TILES | {"num_warps": 0}}),
    ],
)
def test_a_damaged_file_is_reported_in_one_line(file: Path, content: str) -> None:
    file.write_text(content)
    with pytest.raises(ValueError, match=f"{tiles.VARIABLE}={file}: no file of tiles .*; measure anew, or unset it"):
        tiles.measured_tiles("multiply", CONSTANTS, CUDA)

"""How kernels are built, and what happens where they cannot be."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from expert_threshold import native

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    file = tmp_path / "answer.cpp"
    file.write_text(SOURCE)
    return file


@NEEDS_COMPILER
@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="a processor without AMX")
@pytest.mark.skipif(os.environ.get(native.VARIABLE) == "0", reason="kernels are switched off")
def test_where_there_are_a_compiler_and_tiles_there_are_kernels() -> None:
    """Else all their tests would be skipped and nobody would know."""
    assert native.library() is not None
    assert native.available()
    with native.off():
        assert not native.available()
    assert native.available()


@NEEDS_COMPILER
def test_a_library_is_built_once(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for said in ("building kernels", ""):
        library = native._load([source], native.FLAGS, [])
        assert library is not None
        assert library.answer() == 42
        assert said in capfd.readouterr().err
    (built,) = (source.parent / "extensions" / "expert_threshold").iterdir()
    source.write_text(SOURCE.replace("42", "43"))
    changed = native._load([source], native.FLAGS, [])
    assert changed is not None
    assert changed.answer() == 43
    assert built.exists()


@NEEDS_COMPILER
def test_what_does_not_compile_is_left_out_and_the_reason_told(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source.write_text("int answer() { return nothing; }\n")
    assert native._load([source], native.FLAGS, []) is None
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith("kernels for this processor cannot be built, going on without: ")
    assert "nothing" in said
    assert not list((source.parent / "extensions" / "expert_threshold").iterdir())


def test_without_a_compiler_or_switched_off_nothing_is_tried(
    source: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert native._load([source], native.FLAGS, []) is None
    monkeypatch.delenv("CXX")
    monkeypatch.setenv(native.VARIABLE, "0")
    assert native._load([source], native.FLAGS, []) is None
    assert capfd.readouterr().err == ""
    assert not (source.parent / "extensions").exists()


@NEEDS_COMPILER
def test_a_folder_that_cannot_be_written_is_told_and_done_without(
    source: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(source))  # a file
    assert native._load([source], native.FLAGS, []) is None
    assert "cannot be built" in capfd.readouterr().err

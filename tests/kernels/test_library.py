"""How kernels are built, and what happens where they cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from expert_threshold.kernels import cpu

NEEDS_COMPILER = pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="no g++ on Linux")
PACKAGES = Path(cpu.__file__).parents[3]
SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    for variable in (cpu.VARIABLE, "CXX"):
        monkeypatch.delenv(variable, raising=False)
    file = tmp_path / "answer.cpp"
    file.write_text(SOURCE)
    return file


@NEEDS_COMPILER
@pytest.mark.skipif(not torch.cpu.get_capabilities().get("avx512_bf16"), reason="a processor without bfloat16")
@pytest.mark.skipif(os.environ.get(cpu.VARIABLE) == "0", reason="kernels are switched off")
def test_where_there_are_a_compiler_and_products_of_bfloat16_there_are_kernels() -> None:
    """Else all their tests would be skipped and nobody would know."""
    assert cpu.library() is not None
    assert cpu.available()
    with cpu.off():
        assert not cpu.available()
    assert cpu.available()


@NEEDS_COMPILER
def test_a_library_is_built_once(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for said in ("building kernels", ""):
        library = cpu._load([source], cpu.FLAGS, [])
        assert library is not None
        assert library.answer() == 42
        assert said in capfd.readouterr().err
    (built,) = (source.parent / "extensions" / "expert_threshold").iterdir()
    source.write_text(SOURCE.replace("42", "43"))
    changed = cpu._load([source], cpu.FLAGS, [])
    assert changed is not None
    assert changed.answer() == 43
    assert built.exists()


@NEEDS_COMPILER
def test_what_does_not_compile_is_left_out_and_the_reason_told(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source.write_text("int answer() { return nothing; }\n")
    assert cpu._load([source], cpu.FLAGS, []) is None
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith("kernels for this processor cannot be built: ")
    assert said.endswith("going on without, as with EXPERT_THRESHOLD_NATIVE=0")
    assert "nothing" in said
    assert not list((source.parent / "extensions" / "expert_threshold").iterdir())


@NEEDS_COMPILER
def test_a_library_that_was_cut_off_is_built_again(source: Path) -> None:
    assert cpu._load([source], cpu.FLAGS, []) is not None
    (built,) = (source.parent / "extensions" / "expert_threshold").iterdir()
    built.unlink()  # not written over, as it is loaded
    built.write_bytes(b"ELF")
    library = cpu._load([source], cpu.FLAGS, [])
    assert library is not None
    assert library.answer() == 42


@NEEDS_COMPILER
def test_a_library_that_anyone_may_have_written_is_not_loaded(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cpu._load([source], cpu.FLAGS, []) is not None
    (built,) = (source.parent / "extensions" / "expert_threshold").iterdir()
    built.chmod(0o777)
    assert cpu._load([source], cpu.FLAGS, []) is None
    assert "may be written by anyone" in capfd.readouterr().err


@NEEDS_COMPILER
@pytest.mark.parametrize("chosen", ["g++ -DANSWER=42", "clang++", ""])
def test_the_compiler_may_have_arguments_and_is_never_clang(
    source: Path, monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    monkeypatch.setenv("CXX", chosen)
    if "ANSWER" in chosen:
        source.write_text(SOURCE.replace("42", "ANSWER"))
    library = cpu._load([source], cpu.FLAGS, [])
    assert library is not None
    assert library.answer() == 42


def test_where_products_of_blocks_do_not_work_there_are_no_kernels() -> None:
    """Told not to use what the processor has, PyTorch raises, and that in the middle of C++."""
    code = "from expert_threshold.kernels import cpu; raise SystemExit(cpu.library() is not None)"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": str(PACKAGES)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


def test_without_a_compiler_or_switched_off_nothing_is_tried(
    source: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert cpu._load([source], cpu.FLAGS, []) is None
    monkeypatch.delenv("CXX")
    monkeypatch.setenv(cpu.VARIABLE, "0")
    assert cpu._load([source], cpu.FLAGS, []) is None
    assert capfd.readouterr().err == ""
    assert not (source.parent / "extensions").exists()


@pytest.mark.parametrize(
    ("multiplies", "environment", "reason"),
    [
        (False, {}, "this processor does not multiply bfloat16"),
        (True, {cpu.VARIABLE: "0"}, "EXPERT_THRESHOLD_NATIVE=0"),
        (True, {"CXX": "no-such-compiler"}, "there is no C++ compiler no-such-compiler; install g++, or name one"),
    ],
)
def test_the_reason_why_there_are_no_kernels_is_known(
    multiplies: bool, environment: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compiler they were off, and nothing said so."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": multiplies})
    monkeypatch.setattr(cpu, "library", cpu.library.__wrapped__)
    monkeypatch.setattr(cpu, "_built", cpu._built.__wrapped__)
    for variable in (cpu.VARIABLE, "CXX"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert not cpu.available()
    said = cpu.reason()
    assert said is not None
    assert said.startswith(reason)


@pytest.mark.skipif(cpu.library() is None, reason="there are no kernels here")
def test_where_there_are_kernels_there_is_no_reason_but_being_switched_off() -> None:
    assert cpu.reason() is None
    with cpu.off():
        assert cpu.reason() == "they are switched off"


@NEEDS_COMPILER
def test_a_folder_that_cannot_be_written_is_told_and_done_without(
    source: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(source))  # a file
    assert cpu._load([source], cpu.FLAGS, []) is None
    assert "cannot be built" in capfd.readouterr().err

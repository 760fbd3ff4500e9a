"""The build of the kernels, and what happens if it fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from expert_threshold.kernels import VARIABLE, cpu
from expert_threshold.kernels.cpu import blocks, build
from rounding import without_kernels

NEEDS_COMPILER = pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="no g++ on Linux")
PACKAGES = Path(cpu.__file__).parents[3]
SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    for variable in (VARIABLE, "CXX"):
        monkeypatch.delenv(variable, raising=False)
    file = tmp_path / "answer.cpp"
    file.write_text(SOURCE)
    return file


@NEEDS_COMPILER
@pytest.mark.skipif(not torch.cpu.get_capabilities().get("avx512_bf16"), reason="a processor without bfloat16")
@pytest.mark.skipif(os.environ.get(VARIABLE) == "0", reason="kernels are switched off")
def test_kernels_exist_where_there_are_a_compiler_and_bfloat16_products() -> None:
    """Otherwise, all tests of kernels would be skipped without notice."""
    assert not isinstance(cpu.library(), str)
    with without_kernels():
        assert not cpu.available()
        assert cpu.reason() == "EXPERT_THRESHOLD_NATIVE=0"
    assert cpu.available()
    assert cpu.reason() is None


@NEEDS_COMPILER
def test_a_library_is_built_once(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for said in ("building kernels", ""):
        library = build.load(source, [], build.FLAGS, [])
        assert library.answer() == 42
        assert said in capfd.readouterr().err
    (built,) = (source.parent / "extensions" / "expert_threshold").iterdir()
    source.write_text(SOURCE.replace("42", "43"))
    changed = build.load(source, [], build.FLAGS, [])
    assert changed.answer() == 43
    assert built.exists()


SPOILT: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], object], str]] = {
    "a wrong source": (lambda source, _: source.write_text("int answer() { return nothing; }\n"), "nothing"),
    "a slow compiler": (lambda _, patch: patch.setattr(build, "SECONDS", 0), "++ was stopped after 0 seconds"),
    "a file as folder": (lambda source, patch: patch.setenv("TORCH_EXTENSIONS_DIR", str(source)), "answer.cpp"),
}


@NEEDS_COMPILER
@pytest.mark.parametrize(("spoil", "why"), SPOILT.values(), ids=SPOILT)
def test_a_failed_build_is_reported_and_done_without(
    source: Path, spoil: Any, why: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Regression: the skipped tests of kernels reported that there was no compiler."""
    spoil(source, monkeypatch)
    found = build.load(source, [], build.FLAGS, [])
    first, _, last = capfd.readouterr().err.splitlines()[-1].partition("; continuing without them")
    reason = first.removeprefix("kernels for this processor cannot be built: ")
    assert why in reason != first
    assert last == ", as with EXPERT_THRESHOLD_NATIVE=0"
    assert found == f"they cannot be built: {reason}"
    assert not list(source.parent.glob("extensions/expert_threshold/*"))


@NEEDS_COMPILER
def test_a_library_that_was_cut_off_is_built_again(source: Path) -> None:
    assert not isinstance(build.load(source, [], build.FLAGS, []), str)
    (built,) = (source.parent / "extensions" / "expert_threshold").iterdir()
    built.unlink()  # not written over, as it is loaded
    built.write_bytes(b"ELF")
    library = build.load(source, [], build.FLAGS, [])
    assert library.answer() == 42


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("which", "mode", "why"),
    [
        *((which, mode, "is writable by others; run: chmod go-w {}") for which in (0, 1) for mode in (0o770, 0o707)),
        (2, 0o777, "is writable by everyone"),  # the library's own folder may be exchanged between a look and a load
    ],
)
def test_what_others_may_write_is_not_loaded(
    source: Path, which: int, mode: int, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Regression: only the file was checked, but anyone who can write to its folder can replace it."""
    assert not isinstance(build.load(source, [], build.FLAGS, []), str)
    folder = source.parent / "extensions" / "expert_threshold"
    path = (next(folder.iterdir()), folder, folder.parent)[which]
    path.chmod(mode)
    assert isinstance(build.load(source, [], build.FLAGS, []), str)
    assert f"{path} {why.format(path)}" in capfd.readouterr().err
    path.chmod(0o700 if which < 2 else 0o1777)  # as /tmp, where only the owner may rename
    assert not isinstance(build.load(source, [], build.FLAGS, []), str)


@NEEDS_COMPILER
def test_nothing_is_built_in_a_folder_of_others(
    source: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = source.parent / "extensions" / "expert_threshold"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert isinstance(build.load(source, [], build.FLAGS, []), str)
    assert not list(folder.iterdir())
    folder.chmod(0o700)
    if os.getuid() == 0:
        os.chown(folder, 1234, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 1 + folder.stat().st_uid)
    assert isinstance(build.load(source, [], build.FLAGS, []), str)
    assert f"{folder} belongs to another user; set TORCH_EXTENSIONS_DIR" in capfd.readouterr().err


@NEEDS_COMPILER
@pytest.mark.parametrize("which", ["decoder", "blocks"])
def test_our_sources_compile_without_a_warning(which: str, tmp_path: Path) -> None:
    """Compile without slow optimisations, for a processor with all instructions in use and for torch 2.11's ABI."""
    oldest = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # which other headers of torch refuse
    source, flags = {
        "decoder": (build.DECODER, [*build.DECODER_FLAGS, oldest]),
        "blocks": (build.BLOCKS, build.BLOCKS_FLAGS),
    }[which]
    flags = [flag for flag in flags if flag not in ("-O3", "-march=native", "-shared")]
    command = ["g++", *flags, "-march=sapphirerapids", *build.WARNINGS, "-fsyntax-only", str(source)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


@NEEDS_COMPILER
@pytest.mark.parametrize("chosen", ["g++ -DANSWER=42", "clang++", ""])
def test_cxx_may_have_arguments_and_is_never_clang(source: Path, monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    monkeypatch.setenv("CXX", chosen)
    if "ANSWER" in chosen:
        source.write_text(SOURCE.replace("42", "ANSWER"))
    library = build.load(source, [], build.FLAGS, [])
    assert library.answer() == 42


def test_where_products_of_blocks_do_not_work_there_are_no_kernels() -> None:
    """If a setting disables the instructions, PyTorch raises an exception from within C++."""
    code = "from expert_threshold.kernels import cpu; raise SystemExit(not isinstance(cpu.library(), str))"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": str(PACKAGES)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({VARIABLE: "0"}, "EXPERT_THRESHOLD_NATIVE=0"),
        ({"CXX": "no-such-compiler"}, "there is no C++ compiler no-such-compiler; install g++, or name one"),
        ({}, "this processor cannot multiply bfloat16"),
    ],
)
def test_nothing_is_tried_in_vain_and_the_reason_is_known(
    source: Path, environment: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """Regression: without a compiler, kernels were disabled silently."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": bool(environment)})
    monkeypatch.setattr(blocks, "library", blocks.library.__wrapped__)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
        assert build.load(source, [], build.FLAGS, []) == cpu.reason()
    assert not cpu.available()
    assert str(cpu.reason()).startswith(why)
    assert capfd.readouterr().err == ""
    assert not (source.parent / "extensions").exists()

"""Builds C++ libraries with the compiler of this machine on first use and caches them among torch's extensions."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from .. import VARIABLE, forbidden

FOLDER, TORCH = Path(__file__).parent, Path(torch.__file__).parent
DECODER, BLOCKS, OPERATORS = FOLDER / "decode.cpp", FOLDER / "blocks.cpp", FOLDER / "operators.h"
PARTS = sorted({*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h")} - {DECODER, BLOCKS})  # included by BLOCKS
FLAGS = ["-O3", "-march=native", "-std=c++20", "-fPIC", "-shared", "-fopenmp"]
HEADERS = ["-isystem", str(TORCH / "include")]
BLOCKS_FLAGS = [*FLAGS, *HEADERS, "-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512"]
DECODER_FLAGS = [*FLAGS, *HEADERS, "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
LIBRARIES = [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
# Warnings are errors in tests only, since a new warning in a compiler must not disable the kernels for users. GCC 12
# reports uninitialized reads in its own AVX-512 headers.
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
SECONDS = 120  # time limit of the compiler


def missing() -> str | None:
    """Return what this machine lacks to build kernels, and a remedy, or None if it lacks nothing."""
    if sys.platform != "linux":
        return "they are built only on Linux"
    program = compiler()[0]
    if shutil.which(program) is None:
        return f"there is no C++ compiler {program}; install g++, or name one in CXX"
    return None


def compiler() -> list[str]:
    """Return CXX, or g++ if CXX is clang, whose OpenMP runtime would add threads to PyTorch's."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    return chosen if chosen and not any("clang" in word for word in chosen) else ["g++"]


def load(source: Path, includes: list[Path], flags: list[str], libraries: list[str]) -> ctypes.CDLL | str:
    """Return the library for a source and its includes, built if it is not cached, or else why there is none.

    The reason includes any remedy. A failed build is also reported in one line.
    """
    if (why := forbidden() or missing()) is not None:
        return why
    try:
        built = _build(source, includes, flags, libraries)
        try:
            return ctypes.CDLL(str(built))
        except OSError:  # truncated, or built on a machine with other libraries
            built.unlink()
            return ctypes.CDLL(str(_build(source, includes, flags, libraries)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace")
        reason = next((line for line in said.splitlines() if "error" in line), str(error))
        if isinstance(error, subprocess.TimeoutExpired):
            reason = f"{compiler()[0]} was stopped after {SECONDS} seconds"
        print(
            f"kernels for this processor cannot be built: {reason}; continuing without them, as with {VARIABLE}=0",
            file=sys.stderr,
        )
        return f"they cannot be built: {reason}"


def _build(source: Path, includes: list[Path], flags: list[str], libraries: list[str]) -> Path:
    """Build the library and return its path. Raises OSError, RuntimeError or SubprocessError if the build fails."""
    machine = sorted(torch.cpu.get_capabilities().items())
    contents = [file.read_text(encoding="utf-8") for file in (source, *includes)]
    text = "\0".join([*compiler(), *flags, *libraries, torch.__version__, str(machine), *contents])
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions"
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    target = Path(extensions).expanduser() / "expert_threshold" / f"{name}.so"
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_ours(target.parent)
    for above in target.parent.resolve().parents:
        if above.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            raise OSError(f"{above} is writable by everyone, who could replace its contents; run: chmod o-w {above}")
    if target.exists():
        _require_ours(target)
    else:
        print("building kernels for this processor (once; takes a few seconds)", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder) / "built.so"
            command = [*compiler(), *flags, str(source), "-o", str(built), *libraries]
            subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
            built.chmod(0o700)
            os.replace(built, target)  # atomic, since other processes may build at the same time
    return target


def _require_ours(path: Path) -> None:
    """Raise OSError if other users own a file or folder or can write to it, since loading it would run their code."""
    status = path.stat()
    if status.st_uid not in (0, os.getuid()):
        raise OSError(f"{path} belongs to another user; set TORCH_EXTENSIONS_DIR to a folder of your own")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"{path} is writable by others; run: chmod go-w {path}")

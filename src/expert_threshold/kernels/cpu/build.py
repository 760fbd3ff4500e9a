"""Building C++ by the machine's compiler when it is first used, and keeping it among torch's extensions."""

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

FLAGS = ["-O3", "-march=native", "-std=c++20", "-fPIC", "-shared", "-fopenmp"]
# Errors in tests, and not in every build: a compiler that warns of something new must cost nobody the kernels. GCC 12
# takes its own AVX-512 headers for reading what was never written.
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
SECONDS = 120  # a compiler that takes longer hangs


def missing() -> str | None:
    """Return what is missing to build on this machine, and the remedy; None where nothing is."""
    if sys.platform != "linux":
        return "they are built on Linux alone"
    program = compiler()[0]
    if shutil.which(program) is None:
        return f"there is no C++ compiler {program}; install g++, or name one in CXX"
    return None


def compiler() -> list[str]:
    """Return CXX, or g++; not clang, which brings another OpenMP, whose threads PyTorch does not count."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    return chosen if chosen and not any("clang" in word for word in chosen) else ["g++"]


def load(files: list[Path], flags: list[str], libraries: list[str]) -> ctypes.CDLL | None:
    """Return the library of these sources and headers, built unless it is there.

    Returns None where kernels are forbidden or something is missing; where building fails, it says so in one line, too.
    """
    if forbidden() is not None or missing() is not None:
        return None
    try:
        built = _build(files, flags, libraries)
        try:
            return ctypes.CDLL(str(built))
        except OSError:  # cut off in the middle, or of a machine with other libraries
            built.unlink()
            return ctypes.CDLL(str(_build(files, flags, libraries)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace")
        reason = next((line for line in said.splitlines() if "error" in line), str(error))
        print(
            f"kernels for this processor cannot be built: {reason}; going on without, as with {VARIABLE}=0",
            file=sys.stderr,
        )
        return None


def _build(files: list[Path], flags: list[str], libraries: list[str]) -> Path:
    """Return the path of the library. Raises OSError, RuntimeError or SubprocessError where that fails."""
    machine = sorted(torch.cpu.get_capabilities().items())
    contents = [file.read_text(encoding="utf-8") for file in files]
    text = "\0".join([*compiler(), *flags, *libraries, torch.__version__, str(machine), *contents])
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions"
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    target = Path(extensions).expanduser() / "expert_threshold" / f"{name}.so"
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_ours(target.parent)
    if target.exists():
        _require_ours(target)
    else:
        print("building kernels for this processor, which takes some seconds once", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder) / "built.so"
            sources = [str(file) for file in files if file.suffix == ".cpp"]
            command = [*compiler(), *flags, *sources, "-o", str(built), *libraries]
            subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
            built.chmod(0o700)
            os.replace(built, target)  # others may build at the same time
    return target


def _require_ours(path: Path) -> None:
    """Raise OSError where others own a file or folder, or may write to it: loading it would run their code."""
    status = path.stat()
    if status.st_uid not in (0, os.getuid()):
        raise OSError(f"{path} is another user's; give a folder of your own in TORCH_EXTENSIONS_DIR")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"{path} may be written by others; run: chmod go-w {path}")

"""Kernels for processors, in C++: built by the machine's compiler when first used, and kept among torch's extensions.

They multiply bfloat16 matrices block by block where PyTorch's operations would send each intermediate through memory;
and a decoder's is a whole step, of hundreds of operations on a few numbers each. Each has a caller that does the same
by PyTorch's operations where there is no compiler, or another processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

DECODER = Path(__file__).parent / "decode.cpp"
SOURCES = sorted({*Path(__file__).parent.glob("*.cpp")} - {DECODER})
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
FLAGS = ["-O3", "-march=native", "-std=c++20", "-fPIC", "-shared", "-fopenmp", "-w"]
TORCH = ["-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512"]
VARIABLE = "EXPERT_THRESHOLD_NATIVE"
SECONDS = 120  # a compiler that takes longer hangs
_off = False


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels, or None where they cannot run: another processor than one that multiplies bfloat16 tiles (AMX), no
    C++ compiler, or EXPERT_THRESHOLD_NATIVE=0. Takes five seconds the first time.
    """
    if not torch.cpu._is_amx_tile_supported():
        return None
    folder = Path(torch.__file__).parent
    libraries = [f"-I{folder / 'include'}", f"-L{folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    return _load([*SOURCES, *HEADERS], [*FLAGS, *TORCH], libraries)


@functools.cache
def decoder() -> ctypes.CDLL | None:
    """The decoder's, by itself, since any processor can run it; or None as above."""
    return _load([DECODER], [*FLAGS, "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"], [])


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def available() -> bool:
    """Whether there is a library, and it is not `off`."""
    return not _off and library() is not None


@contextmanager
def off() -> Iterator[None]:
    """PyTorch's operations in the place of kernels, to compare; a decoder that exists keeps its own."""
    global _off
    before, _off = _off, True
    try:
        yield
    finally:
        _off = before


def _load(files: list[Path], flags: list[str], libraries: list[str]) -> ctypes.CDLL | None:
    if os.environ.get(VARIABLE) == "0" or sys.platform != "linux":
        return None
    try:
        return ctypes.CDLL(str(_build(files, flags, libraries)))
    except FileNotFoundError:  # no compiler
        return None
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace")
        reason = next((line for line in said.splitlines() if "error" in line), str(error))
        print(f"kernels for this processor cannot be built, going on without: {reason}", file=sys.stderr)
        return None


def _build(files: list[Path], flags: list[str], libraries: list[str]) -> Path:
    """The shared library, compiled unless it is there. Raises OSError or SubprocessError where that fails."""
    compiler = os.environ.get("CXX", "g++")
    machine = sorted(torch.cpu.get_capabilities().items())
    contents = [file.read_text() for file in files]
    text = "\0".join([compiler, *flags, *libraries, torch.__version__, str(machine), *contents])
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions"
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    target = Path(extensions).expanduser() / "expert_threshold" / f"{name}.so"
    if not target.exists():
        if shutil.which(compiler) is None:
            raise FileNotFoundError(compiler)
        target.parent.mkdir(parents=True, exist_ok=True)
        print("building kernels for this processor, which takes some seconds once", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder) / "built.so"
            sources = [str(file) for file in files if file.suffix == ".cpp"]
            command = [compiler, *flags, *sources, "-o", str(built), *libraries]
            subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
            os.replace(built, target)  # others may build at the same time
    return target


def address(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    """Of a contiguous tensor's first number; null for None and where there are none. The tensor lives as long."""
    assert tensor is None or (tensor.is_contiguous() and tensor.is_cpu)
    pointer = ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
    pointer.tensor = tensor  # type: ignore[attr-defined]
    return pointer

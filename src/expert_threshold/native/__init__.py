"""Kernels for processors, in C++: built by the machine's compiler when first used, and kept among torch's extensions.

They multiply bfloat16 matrices block by block where PyTorch's operations would send each intermediate through memory.
Each has a caller that does the same by PyTorch's operations where there is no compiler, or another processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
FLAGS = ["-O3", "-march=native", "-std=c++20", "-fPIC", "-shared", "-fopenmp", "-w"]
FLAGS += ["-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512"]
VARIABLE = "EXPERT_THRESHOLD_NATIVE"
SECONDS = 120  # a compiler that takes longer hangs


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels, or None where they cannot run: another processor than one that multiplies bfloat16 tiles (AMX), no
    C++ compiler, or EXPERT_THRESHOLD_NATIVE=0. Takes five seconds the first time.
    """
    if os.environ.get(VARIABLE) == "0" or sys.platform != "linux" or not torch.cpu._is_amx_tile_supported():
        return None
    try:
        return ctypes.CDLL(str(_build()))
    except (OSError, subprocess.SubprocessError):
        return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def available() -> bool:
    """Whether there is a library."""
    return library() is not None


def _build() -> Path:
    """The shared library, compiled unless it is there. Raises OSError or SubprocessError where that fails."""
    compiler, torch_folder = os.environ.get("CXX", "g++"), Path(torch.__file__).parent
    libraries = [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    machine = sorted(torch.cpu.get_capabilities().items())
    files = [file.read_text() for file in SOURCES + HEADERS]
    text = "\0".join([compiler, *FLAGS, *libraries, torch.__version__, str(machine), *files])
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions"
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    target = Path(extensions).expanduser() / "expert_threshold" / f"{name}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        print("building kernels for this processor, which takes some seconds once", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder) / "built.so"
            command = [compiler, *FLAGS, *map(str, SOURCES), "-o", str(built), *libraries]
            subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
            os.replace(built, target)  # others may build at the same time
    return target


def address(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    """Of a tensor's first number; null for None and where there are none. The caller keeps the tensor."""
    assert tensor is None or (tensor.is_contiguous() and tensor.is_cpu)
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())

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
import shlex
import shutil
import stat
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
TILE = 32  # sizes of matrices that processors multiply in tiles are multiples of it
FEWEST_ROWS = 64  # with fewer, a call and what it packs cost more than they save
_off = False


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels, or None where they cannot run: a processor that does not multiply bfloat16 (AVX-512 BF16, AMX), a
    PyTorch that does not multiply blocks for us, no C++ compiler (CXX, else g++), or EXPERT_THRESHOLD_NATIVE=0. Takes
    five seconds the first time.
    """
    kernels = _built() if _multiplies_bfloat16() else None
    return kernels if kernels is not None and kernels.et_works() else None


@functools.cache
def _built() -> ctypes.CDLL | None:
    """The kernels, whether or not PyTorch multiplies blocks for them."""
    folder = Path(torch.__file__).parent
    libraries = [f"-I{folder / 'include'}", f"-L{folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    kernels = _load([*SOURCES, *HEADERS], [*FLAGS, *TORCH], libraries)
    if kernels is not None:
        kernels.et_works.restype, kernels.et_padded.restype = ctypes.c_bool, ctypes.c_int64
    return kernels


@functools.cache
def decoder() -> ctypes.CDLL | None:
    """The decoder's, by itself, since any processor can run it; or None as above."""
    return _load([DECODER], [*FLAGS, "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"], [])


def available() -> bool:
    """Whether there is a library, and it is not `off`."""
    return not _off and library() is not None


# What torch.compiler.assume_constant_result does, but for importing the whole compiler.
available._dynamo_marked_constant = True  # type: ignore[attr-defined]


def reason() -> str | None:
    """Why kernels are not `available`, with the remedy where there is one; None where they are."""
    if available():
        return None
    if _off:
        return "they are switched off"
    if not _multiplies_bfloat16():
        return "this processor does not multiply bfloat16 (AVX-512 BF16 or AMX)"
    if (missing := _missing()) is not None:
        return missing
    if _built() is None:
        return "they cannot be built, as told above"
    return "this PyTorch multiplies no blocks of bfloat16 on this processor; see ONEDNN_MAX_CPU_ISA, if that is set"


def _multiplies_bfloat16() -> bool:
    return bool(torch.cpu.get_capabilities().get("avx512_bf16", False))


def _missing() -> str | None:
    """What there is to build on lacks, and the remedy."""
    if os.environ.get(VARIABLE) == "0":
        return f"{VARIABLE}=0"
    if sys.platform != "linux":
        return "they are built on Linux alone"
    compiler = _compiler()[0]
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler {compiler}; install g++, or name one in CXX"
    return None


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
    if _missing() is not None:
        return None
    compiler = _compiler()
    try:
        built = _build(compiler, files, flags, libraries)
        try:
            return ctypes.CDLL(str(built))
        except OSError:  # cut off in the middle, or of a machine with other libraries
            built.unlink()
            return ctypes.CDLL(str(_build(compiler, files, flags, libraries)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace")
        reason = next((line for line in said.splitlines() if "error" in line), str(error))
        print(
            f"kernels for this processor cannot be built: {reason}; going on without, as with {VARIABLE}=0",
            file=sys.stderr,
        )
        return None


def _compiler() -> list[str]:
    """CXX, or g++; not clang, which brings another OpenMP, whose threads PyTorch does not count."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    return chosen if chosen and not any("clang" in word for word in chosen) else ["g++"]


def _build(compiler: list[str], files: list[Path], flags: list[str], libraries: list[str]) -> Path:
    """The shared library, compiled unless it is there; OSError, RuntimeError or SubprocessError where that fails."""
    machine = sorted(torch.cpu.get_capabilities().items())
    contents = [file.read_text(encoding="utf-8") for file in files]
    text = "\0".join([*compiler, *flags, *libraries, torch.__version__, str(machine), *contents])
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions"
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    target = Path(extensions).expanduser() / "expert_threshold" / f"{name}.so"
    if target.exists():
        status = target.stat()
        if status.st_uid not in (0, os.getuid()) or status.st_mode & stat.S_IWOTH:
            raise OSError(f"{target} is another's, or may be written by anyone")
    else:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        print("building kernels for this processor, which takes some seconds once", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder) / "built.so"
            sources = [str(file) for file in files if file.suffix == ".cpp"]
            command = [*compiler, *flags, *sources, "-o", str(built), *libraries]
            subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
            os.replace(built, target)  # others may build at the same time
    return target


def address(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    """Of a contiguous tensor's first number; null for None and where there are none. The tensor lives as long."""
    assert tensor is None or (tensor.is_contiguous() and tensor.is_cpu)
    pointer = ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
    pointer.tensor = tensor  # type: ignore[attr-defined]
    return pointer

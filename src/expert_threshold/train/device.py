"""Adapts a run to its machine: device, compute dtype, kernels, memory allocator and garbage collector."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..kernels.cpu import available, reason
from ..optim.muon import fast_dtype


def pick_device(name: str) -> torch.device:
    """Return the named device. 'auto' prefers CUDA to the CPU. Raises ValueError if the device is not available."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device={name}: torch {torch.__version__} finds no CUDA device; use --device cpu")
    if name == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device={name}: torch {torch.__version__} finds no Apple GPU; use --device cpu")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the named compute dtype. 'auto' picks bfloat16 if the hardware can multiply it, otherwise float32."""
    dtypes = {"auto": fast_dtype(device), "bfloat16": torch.bfloat16, "float32": torch.float32}
    if name not in dtypes:
        raise ValueError(f"dtype={name!r} is unknown; use one of {', '.join(dtypes)}")
    return dtypes[name]


def kernels_run(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if the kernels in `kernels/cpu` can be used. Builds them if the device and dtype call for it."""
    return device.type == "cpu" and dtype == torch.bfloat16 and available()


def kernels_off(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return a line that explains why a CPU run does not use kernels, or None if it does or runs on a GPU."""
    if device.type != "cpu" or kernels_run(device, dtype):
        return None
    by_choice = dtype != torch.bfloat16 and fast_dtype(device) == torch.bfloat16
    why = "they compute in bfloat16, and this run does not" if by_choice else reason()
    return f"kernels are off: {why}; PyTorch's operations compute the same results more slowly"


def _cpu() -> str:
    """Return the processor's name with its family and model, since virtual machines often hide the exact name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    name = facts.get("model name") or platform.processor() or platform.machine()
    if {"cpu family", "model"} <= facts.keys():
        return f"{name}, family {facts['cpu family']}, model {facts['model']}"
    return name


def machine(device: torch.device, threads: int | None = None) -> dict[str, Any]:
    """Return what determines a run's speed: the CPU, its cores, torch's threads, and the GPU if one is used."""
    return {
        "system": platform.system(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": threads or torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }


HEAP_BYTES = 4 << 30  # of address space, not of memory


def keep_freed_memory() -> None:
    """Make glibc keep freed memory instead of returning it, so that large tensors do not cause new page faults.

    The heap is extended once by an untouched block of huge pages, from which tensors are then allocated. Without it,
    each of quickstart's first few dozen steps has thousands of page faults, which take 5 µs each. This affects the
    whole process, but does nothing if malloc is not glibc's.
    """
    if sys.platform != "linux":
        return
    try:
        libc = ctypes.CDLL("libc.so.6")
        mallopt, malloc, free, madvise = libc.mallopt, libc.malloc, libc.free, libc.madvise
    except (OSError, AttributeError):
        return
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX in malloc.h
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, -1)
    malloc.restype, malloc.argtypes, free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    block = malloc(HEAP_BYTES)
    if block is None:  # the system does not overcommit
        return
    huge_page, hugepages = 2 << 20, 14  # MADV_HUGEPAGE in mman.h, a hint that may be refused
    start = -(-block // huge_page) * huge_page
    madvise(ctypes.c_void_p(start), ctypes.c_size_t(HEAP_BYTES - 2 * huge_page), hugepages)
    free(block)


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Exclude all existing objects from garbage collection within the context.

    A corpus and a tokenizer consist of millions of objects. Scanning them takes as long as a small step.
    """
    if gc.get_freeze_count():  # unfreezing would also unfreeze the objects that the host program has frozen
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()

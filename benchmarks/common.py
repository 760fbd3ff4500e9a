"""What the benchmarks share: interleaved timing, the machine's name, the compute dtype."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from expert_threshold.train import device

device.keep_freed_memory()


def time_interleaved(calls: dict[str, Callable[[], object]], repeats: int, warmup: int = 2) -> dict[str, list[float]]:
    """Seconds of every call, `repeats` times, in turn, so that drifts of the machine meet all alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(warmup + repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if repeat >= warmup:
                times[name].append(time.perf_counter() - start)
    return times


def compute_dtype(name: str) -> torch.dtype:
    """'auto' is bfloat16 where this machine multiplies it in hardware, else float32."""
    return device.pick_dtype(name, torch.device("cpu"))


def machine() -> dict[str, Any]:
    """Processor, threads and versions, for the record."""
    here = device.machine(torch.device("cpu"))
    versions = {"capability": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__}
    return {name: here[name] for name in ("cpu", "threads")} | versions

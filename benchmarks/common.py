"""What the benchmarks share: interleaved timing, the machine's name, the compute dtype."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from expert_threshold.train.device import keep_freed_memory, pick_dtype

keep_freed_memory()


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
    return pick_dtype(name, torch.device("cpu"))


def machine() -> dict[str, str | int]:
    """Processor, threads and versions, for the record."""
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }

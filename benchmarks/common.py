"""Helpers of all benchmarks: interleaved timing, the machine's name, the compute dtype."""

from __future__ import annotations

import datetime
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from expert_threshold.cli import main as et
from expert_threshold.train import device

device.keep_freed_memory()


CPU = torch.device("cpu")


def time_interleaved(
    calls: dict[str, Callable[[], object]], repeats: int, warmup: int = 2, on: torch.device = CPU
) -> dict[str, list[float]]:
    """Seconds of every call, `repeats` times, in turn, so that drifts of the machine meet all alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    with device.objects_at_rest():  # as in training
        for repeat in range(warmup + repeats):
            for name, call in calls.items():
                seconds = _seconds(call, on)
                if repeat >= warmup:
                    times[name].append(seconds)
    return times


def _seconds(call: Callable[[], object], on: torch.device) -> float:
    """Return the seconds of one call; on CUDA by the device's clock, from an idle device to the end of all its work."""
    if on.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(on)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def compute_dtype(name: str) -> torch.dtype:
    """'auto' is bfloat16 where this machine multiplies it in hardware, else float32."""
    return device.pick_dtype(name, torch.device("cpu"))


def call(*arguments: object) -> None:
    """`et ARGUMENTS` in this process; ends it where that fails."""
    code = et([str(argument) for argument in arguments])
    if code:
        sys.exit(code)


def over_seeds(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.mean(values), "spread": statistics.stdev(values) if len(values) > 1 else 0.0}


def origin() -> dict[str, str | None]:
    """When, and of which commit."""
    command = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout
    return {"date": datetime.date.today().isoformat(), "commit": commit.strip() or None}


def machine(on: torch.device = CPU) -> dict[str, Any]:
    """Processor, threads and versions, for the record; of CUDA devices these, too."""
    here = device.machine(on)
    versions = {"capability": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__}
    gpu = {"gpu": here["gpu"], "cuda": torch.version.cuda or torch.version.hip} if on.type == "cuda" else {}
    return {name: here[name] for name in ("cpu", "threads")} | versions | gpu

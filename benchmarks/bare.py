"""Interleaved timing and the commit, for benchmarks that need nothing but torch."""

from __future__ import annotations

import datetime
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

CPU = torch.device("cpu")


def time_in_turn(
    calls: dict[str, Callable[[], object]], repeats: int, warmup: int = 2, on: torch.device = CPU
) -> dict[str, list[float]]:
    """Return each call's seconds, `repeats` times, alternating, so that drifts of the machine affect all alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(warmup + repeats):
        for name, call in calls.items():
            seconds = seconds_of(call, on)
            if repeat >= warmup:
                times[name].append(seconds)
    return times


def median_times(
    calls: dict[str, Callable[[], object]], repeats: int, warmup: int = 2, on: torch.device = CPU
) -> dict[str, float]:
    return {name: statistics.median(times) for name, times in time_in_turn(calls, repeats, warmup, on).items()}


def seconds_of(call: Callable[[], object], on: torch.device) -> float:
    """Return the seconds of one call; on CUDA by the device's clock, from an idle device to the end of its work."""
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


def commit_of(checkout: Path) -> str | None:
    """Return the commit of a checkout, None without one or without Git."""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:
        return None


def origin() -> dict[str, str | None]:
    """Return the date and the commit of this checkout."""
    return {"date": datetime.date.today().isoformat(), "commit": commit_of(Path(__file__).parent)}

"""Helpers of all benchmarks: interleaved timing, the machine's name, the compute dtype, the exit code."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from bare import CPU, time_in_turn

from expert_threshold.cli import main as et
from expert_threshold.cli.run_options import parse_run, resolve_run
from expert_threshold.config import SECTIONS
from expert_threshold.runs import RunFolder
from expert_threshold.train import device
from expert_threshold.train.checks import FREE_ON_RESUME

OF_MACHINE = FREE_ON_RESUME - {"compile", "eval_tokens"} | {"dtype"}
device.keep_freed_memory()


def time_interleaved(
    calls: dict[str, Callable[[], object]], repeats: int, warmup: int = 2, on: torch.device = CPU
) -> dict[str, list[float]]:
    """Return `time_in_turn`'s times, measured while objects are at rest, as in training."""
    with device.gc_frozen():
        return time_in_turn(calls, repeats, warmup, on)


def positive(text: str) -> int:
    """The type of an option of argparse that counts something."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1")
    return number


def compute_dtype(name: str) -> torch.dtype:
    """'auto' is bfloat16 where this machine multiplies it in hardware, else float32."""
    return device.pick_dtype(name, torch.device("cpu"))


def call(*arguments: object) -> None:
    """`et ARGUMENTS` in this process; ends it where that fails."""
    code = et([str(argument) for argument in arguments])
    if code:
        sys.exit(code)


def require_same(out: Path, arguments: Sequence[object]) -> None:
    """Raise ValueError if the run in `out` has other options than `et train ARGUMENTS` has, its machine's aside."""
    folder = RunFolder.open(out)
    now = json.loads(json.dumps(resolve_run(parse_run("et train", "", [], [*map(str, arguments)])).to_dict()))
    for section in SECTIONS:
        before = folder.section(section)
        for name, value in now[section].items():
            if value != before.get(name) and name not in OF_MACHINE:
                raise ValueError(f"{name}={value!r} differs from {before.get(name)!r} of {out}; name another --out")


def run(main: Callable[[], int | None], interrupted: str = "interrupted") -> NoReturn:
    """Exit with the result of a benchmark's `main`: with 2 and one line for a ValueError, with 130 if interrupted."""
    name = Path(sys.argv[0]).stem
    try:
        sys.exit(main())
    except ValueError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{name}: {interrupted}", file=sys.stderr)
        sys.exit(130)


def over_seeds(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.mean(values), "spread": statistics.stdev(values) if len(values) > 1 else 0.0}


def machine(on: torch.device = CPU) -> dict[str, Any]:
    """Processor, threads and versions, for the record; of CUDA devices these, too."""
    here = device.machine(on)
    versions = {"capability": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__}
    gpu = {"gpu": here["gpu"], "cuda": torch.version.cuda or torch.version.hip} if on.type == "cuda" else {}
    return {name: here[name] for name in ("cpu", "threads")} | versions | gpu

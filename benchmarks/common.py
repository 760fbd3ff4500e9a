"""Helpers of all benchmarks: options, interleaved timing, the machine's name, the compute dtype, the exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from bare import CPU, time_in_turn

from expert_threshold.cli import main as et
from expert_threshold.train import device

device.keep_freed_memory()


def time_interleaved(calls: dict[str, Callable[[], object]], repeats: int, warmup: int = 2) -> dict[str, list[float]]:
    """Return `time_in_turn`'s times, measured while objects are at rest, as in training."""
    with device.gc_frozen():
        return time_in_turn(calls, repeats, warmup)


def options(about: str | None, repeats: int | None, threads: int = 2, *, dtype: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark that takes times; it prints a flat JSON object a line.

    repeats: the default of --repeats; None is no such option.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if dtype:
        parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    if repeats is not None:
        parser.add_argument("--repeats", type=positive, default=repeats)
    parser.add_argument("--threads", type=positive, default=threads)
    return parser


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


def machine(on: torch.device = CPU) -> dict[str, Any]:
    """Processor, threads and versions, for the record; of CUDA devices these, too."""
    here = device.machine(on)
    versions = {"capability": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__}
    gpu = {"gpu": here["gpu"], "cuda": torch.version.cuda or torch.version.hip} if on.type == "cuda" else {}
    return {name: here[name] for name in ("cpu", "threads")} | versions | gpu

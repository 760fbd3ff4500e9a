"""Runs stages one after the other, each in a process of its own, and outlives whatever happens to them."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import BaseContext

from .record import Record
from .setting import Setting
from .stages import STAGES
from .worker import LOST_DEVICE, work

GRACE = 20.0
"""Seconds beyond its share that a stage may take to end the case that it is at; then it is stopped."""
PATIENCE = 8.0
"""Seconds that a process has to end after it was told to."""
LEAST = 8.0
"""Seconds without which no stage is begun."""
RESTARTS = 8
"""Number of times a stage is restarted after its process dies."""


def clean_processes() -> BaseContext:
    """Return a way to start processes that have torch imported and CUDA untouched, in a tenth of a second each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.gpu.worker"])
    return context


def conduct(stages: Sequence[str], setting: Setting, end: float, context: BaseContext) -> None:
    """Run the stages that are not complete, by `end` on the clock of `time.monotonic`.

    Time that a stage leaves goes to those that follow. Raises KeyboardInterrupt after ending the stage that runs.
    """
    todo = [stage for stage in stages if not Record(setting.out, stage).complete]
    for stage in stages:
        if stage not in todo:
            print(f"{stage}: complete in {setting.out}", flush=True)
    for number, stage in enumerate(todo):
        left = end - time.monotonic()
        if left < LEAST:
            print(f"no time is left for {', '.join(todo[number:])}")
            return
        share = STAGES[stage].share / sum(STAGES[other].share for other in todo[number:])
        print(f"{stage} ({number + 1} of {len(todo)}, {left / 60:.1f} min left in all): {STAGES[stage].says}")
        deadline = time.monotonic() + left * share
        _run_stage(stage, setting._replace(deadline=deadline), min(deadline + GRACE, end), context)


def _run_stage(stage: str, setting: Setting, end: float, context: BaseContext) -> None:
    """Run one stage in as many processes as it takes, until `end`."""
    for _ in range(1 + RESTARTS):
        process = context.Process(target=work, args=(stage, setting))  # type: ignore[attr-defined]
        _ignoring_interrupts(process.start)
        try:
            process.join(max(end - time.monotonic(), 0))
            stopped = process.is_alive()
        finally:
            _stop(process)
        if process.exitcode == 0:
            return
        record = Record(setting.out, stage)
        if record.running is not None:
            status = "timed out" if stopped else "failed"
            why = "the stage's time was up" if stopped else f"the process ended with exit code {process.exitcode}"
            record.put(record.running, status, {"reason": why})
        elif process.exitcode != LOST_DEVICE:
            return  # it failed outside its cases, and would again
        if stopped or time.monotonic() > setting.deadline:
            return


def _ignoring_interrupts(start: Callable[[], None]) -> None:
    """Start a process that Ctrl-C does not reach: this one ends it in order."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        start()
    finally:
        signal.signal(signal.SIGINT, before)


def _stop(process: multiprocessing.process.BaseProcess) -> None:
    """End a process that still runs: by SIGTERM, on which a training run saves, then by SIGKILL."""
    for tell in (process.terminate, process.kill):
        if process.is_alive():
            tell()
            process.join(PATIENCE)

"""Runs stages one after the other, each in a process of its own, and outlives whatever happens to them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.context import BaseContext

import torch

from .record import DONE, NOT_RUN, Record
from .setting import Case, NotRunError, OutOfTimeError, Row, Setting, facts
from .stages import STAGES, module_of

GRACE = 20.0  # seconds beyond its share that a stage may take to end the case that it is at; then it is stopped
PATIENCE = 8.0  # seconds that a process has to end after SIGTERM
LEAST = 8.0  # seconds without which no stage is started
RESTARTS = 8  # times that a stage is restarted after its process dies
LOST_DEVICE = 75  # exit code after an error that leaves CUDA unusable in this process; the next cases need another
BROKEN = ("CUDA error", "illegal memory access", "device-side assert", "unspecified launch failure")


def clean_processes() -> BaseContext:
    """Return a way to start processes that have torch imported and CUDA untouched, in a tenth of a second each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.gpu.conduct"])
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
        print(f"{stage} ({number + 1} of {len(todo)}, {left / 60:.1f} min left in all): {STAGES[stage].help}")
        deadline = time.monotonic() + left * share
        _run_stage(stage, setting._replace(deadline=deadline), min(deadline + GRACE, end), context)


def _run_stage(stage: str, setting: Setting, end: float, context: BaseContext) -> None:
    """Run one stage in as many processes as it takes, until `end`."""
    for _ in range(1 + RESTARTS):
        process = context.Process(target=work, args=(stage, setting))  # type: ignore[attr-defined]
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C does not reach it: this process ends it in order
        process.start()
        signal.signal(signal.SIGINT, before)
        try:
            process.join(max(end - time.monotonic(), 0))
            stopped = process.is_alive()
        finally:
            for kill in (process.terminate, process.kill):  # on SIGTERM a training run saves
                if process.is_alive():
                    kill()
                    process.join(PATIENCE)
        if process.exitcode == 0:
            return
        record = Record(setting.out, stage)
        running = [*record.having("running")]
        if running:
            status = "timed out" if stopped else "failed"
            why = "the stage's time was up" if stopped else f"the process ended with exit code {process.exitcode}"
            record.put(running[0], status, {"reason": why})
        elif process.exitcode != LOST_DEVICE:
            return  # it failed outside its cases, and would again
        if stopped or time.monotonic() > setting.deadline:
            return


# In the process of one stage.


def work(stage: str, setting: Setting) -> None:
    """Run the cases of a stage that are not recorded yet, until its time is up."""
    if setting.dry or stage == "compile":
        interpreted = stage != "compile" and "triton" not in sys.modules
        os.environ["TRITON_INTERPRET"] = "1" if interpreted else "0"
    # For determinism; read when cuBLAS starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # as in training
    record, cases = Record(setting.out, stage), list(module_of(stage).cases(setting))
    done = record.having(*DONE)
    record.facts, record.cases = facts(setting), {case.name: done.get(case.name, NOT_RUN) for case in cases}
    record.write()
    for case in cases:
        if case.name not in done and setting.left >= (0 if setting.dry else case.seconds):
            run_case(record, case, setting)


def run_case(record: Record, case: Case, setting: Setting) -> None:
    """Run one case and record its row, or why there is none."""
    record.put(case.name, "running", {})
    start = time.perf_counter()
    status, row = "measured", Row()
    try:
        row = case.run()
    except OutOfTimeError as reason:
        status, row = "not run", {"reason": str(reason)}
    except NotRunError as reason:
        status, row = "unavailable", {"reason": str(reason)}
    except Exception as failure:  # of whatever kind: the others go on
        status, text = "failed", " ".join(str(failure).split())[:300]
        row = {"reason": f"{type(failure).__name__}: {text}", "traceback": traceback.format_exc().splitlines()[-12:]}
    taken = round(time.perf_counter() - start, 3)
    record.put(case.name, status, {"seconds": taken, **row})
    left = "" if setting.dry else f"{max(setting.left, 0):4.0f} s left  "
    why = f": {row['reason']}" if "reason" in row else ""
    print(f"  {left}{case.name}: {status}, {taken:.1f} s{why}", flush=True)
    if status == "failed" and not setting.dry and any(words in row["reason"] for words in BROKEN):
        sys.exit(LOST_DEVICE)

"""Forks itself, with everything imported, for each line of JSON on stdin: a command of `et`, its variables, where its
output goes, and where it fails. {"wait": PID} answers with its exit code, null if it hung, and its CPU seconds.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from typing import Any, NoReturn

import torch._dynamo
import torch.distributed  # noqa: F401

from expert_threshold import full_run
from expert_threshold.cli import evaluate, export, main, train  # noqa: F401
from expert_threshold.files import replace_file
from expert_threshold.train import prepare

prepare._commit = lambda: None
full_run.write_report = lambda run, _: replace_file(run.report, b"drawing figures would take most of the time")
faults = ctypes.CDLL(None)
PATIENCE = 120.0  # seconds that a command may take


def work(task: dict[str, Any]) -> NoReturn:
    for number, path in ((1, task["out"]), (2, task["err"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.update(task["variables"])
    below, *fault = (task[name] for name in ("below", "at", "error", "lasting"))
    faults.faults_arm(below.encode(), *fault, ctypes.c_double(task["seconds"]), task["signal"])
    try:
        code = main(task["arguments"])
    finally:
        print(f"changes {faults.faults_seen()}")
        sys.stdout.flush()
    os._exit(code)


def wait(process: int) -> tuple[int | None, float]:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        found, status, used = os.wait4(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
        time.sleep(0.002)
    os.kill(process, 9)
    os.wait4(process, 0)
    return None, PATIENCE


def serve() -> None:
    gc.freeze()
    for line in sys.stdin:
        task = json.loads(line)
        if "wait" in task:
            print(json.dumps(wait(task["wait"])), flush=True)
            continue
        if (process := os.fork()) == 0:
            work(task)
        print(process, flush=True)


if __name__ == "__main__":
    serve()
    os._exit(0)  # extension modules would report what is never collected

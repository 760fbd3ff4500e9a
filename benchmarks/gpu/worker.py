"""The process of one stage: runs its cases, each by itself, and records them as they end."""

from __future__ import annotations

import os
import sys
import time
import traceback

from .about import facts
from .record import Record
from .setting import Case, NotRunError, OutOfTimeError, Setting
from .stages import STAGES, module_of
from .tuning import FILE, TILES

LOST_DEVICE = 75
"""Exit code after an error that leaves CUDA unusable in this process; the cases that follow need a new one."""
BROKEN = ("CUDA error", "illegal memory access", "device-side assert", "unspecified launch failure")


def work(stage: str, setting: Setting) -> None:
    """Run the cases of a stage that are not recorded yet, until its time is up."""
    if setting.dry or stage == "compile":
        interpreted = STAGES[stage].interpreted and "triton" not in sys.modules
        os.environ["TRITON_INTERPRET"] = "1" if interpreted else "0"
    if (tiles := setting.out / FILE).exists():
        os.environ[TILES] = str(tiles)
    # For determinism; read when cuBLAS starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    record = Record(setting.out, stage)
    record.facts = facts(setting.device)
    record.write()
    for case in module_of(stage).cases(setting):
        if record.is_done(case.name):
            continue
        if setting.left < (0 if setting.dry else case.seconds):
            record.put(case.name, "not run", {"reason": "its time was up"})
            continue
        run_case(record, case, setting)
    record.end()


def run_case(record: Record, case: Case, setting: Setting) -> None:
    """Run one case and record its row, or why there is none."""
    record.begin(case.name)
    start = time.perf_counter()
    try:
        status, row = "measured", case.run()
    except OutOfTimeError as reason:
        status, row = "not run", {"reason": str(reason)}
    except NotRunError as reason:
        status, row = "unavailable", {"reason": str(reason)}
    except Exception as failure:  # of whatever kind: the others go on
        status = "failed"
        row = {"reason": in_one_line(failure), "traceback": traceback.format_exc().splitlines()[-12:]}
    taken = round(time.perf_counter() - start, 3)
    record.put(case.name, status, {"seconds": taken, **row})
    left = "" if setting.dry else f"{max(setting.left, 0):4.0f} s left  "
    print(f"  {left}{case.name}: {status}, {taken:.1f} s" + _reason(row), flush=True)
    if status == "failed" and not setting.dry and any(words in row["reason"] for words in BROKEN):
        sys.exit(LOST_DEVICE)


def _reason(row: dict[str, object]) -> str:
    return f": {row['reason']}" if "reason" in row else ""


def in_one_line(failure: Exception) -> str:
    """Return an error's kind and its first line."""
    text = " ".join(str(failure).split())
    return f"{type(failure).__name__}: {text[:300]}".rstrip(": ")

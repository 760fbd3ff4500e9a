"""Training in earnest: `et compare` of small runs, in folders that `et` reads; runs that are cut off resume later."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator

from cases import write_text

from . import ROOT
from .setting import Case, OutOfTimeError, Row, Setting, require

METHODS = (
    "dense,expert_threshold,token_choice,expert_choice_batch,quantile_balancing,expert_choice_sequence,"
    "token_choice_loss_free"
)
OPTIONS = {"--tokens": 400 * 128 * 1024, "--seeds": 3, "--rules": METHODS, "--eval-every": 100, "--eval-tokens": 2**20}
TOY = {
    "--steps": 2, "--rules": "dense,expert_threshold", "--batch-size": 2, "--context": 32, "--eval-every": 2,
    "--eval-tokens": 256, "--threads": 1, "--device": "cpu",
}  # fmt: skip
SAVING = 12.0  # seconds that a run needs to stop


def cases(setting: Setting) -> Iterator[Case]:
    """Yield the comparison, which trains all methods of one seed before the next."""
    yield Case("comparison", lambda: compare(setting), SAVING + 35)


def compare(setting: Setting) -> Row:
    """Train what is missing. Raises OutOfTimeError if a run was saved before its end."""
    require("rustbpe", "rich")
    from expert_threshold.cli import main

    folder = setting.out / "training"
    data = write_text(setting.out / ".text.jsonl", (ROOT / "LICENSE").read_text()) if setting.dry else setting.data
    options = {"--data": data, "--out": folder, **setting.pick(OPTIONS, TOY)}
    flags = [str(part) for option in options.items() for part in option]
    with contextlib.ExitStack() as during:
        log = during.enter_context((setting.out / "training.log").open("a"))
        for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr):
            during.enter_context(redirect(log))
        during.enter_context(stopped_in_time(setting))
        code = main(["compare", setting.pick("d6", "tiny"), *flags])
    runs = json.loads((folder / "compare.json").read_text())["runs"] if (folder / "compare.json").exists() else []
    if code == 130:
        raise OutOfTimeError(f"saved after {len(runs)} runs; resumes from there")
    assert code == 0, (setting.out / "training.log").read_text()[-300:]
    return {"runs": runs}


@contextlib.contextmanager
def stopped_in_time(setting: Setting) -> Iterator[None]:
    """Send this process SIGTERM, on which training saves and returns, shortly before the stage's time is up."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # outside of training, too
    seconds = min(max(setting.left - SAVING, 1), threading.TIMEOUT_MAX)
    alarm = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    alarm.daemon = True
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()
        signal.signal(signal.SIGTERM, before)


def lines(rows: dict[str, Row]) -> list[str]:
    """Return each run's loss, the lowest first."""
    runs = sorted((run["loss"], run["method"], run["seed"]) for row in rows.values() for run in row["runs"])
    return ["validation loss: " + ", ".join(f"{method} {loss:.4f} (seed {seed})" for loss, method, seed in runs)]

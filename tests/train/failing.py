"""`et train` on a rank on which something goes wrong: `python failing.py WHAT RANK STEP train …`."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from typing import Any

from expert_threshold.cli import main
from expert_threshold.train import loop
from expert_threshold.train.state import TrainState

WHAT, RANK, STEP = sys.argv[1], sys.argv[2], int(sys.argv[3])
train_step = loop.train_step


def failing(state: TrainState, status: Any) -> bool:
    if state.step == STEP and os.environ["RANK"] == RANK and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if WHAT == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if WHAT == "hung":
            threading.Event().wait()
        if WHAT == "raising":
            raise ZeroDivisionError("by zero")
        if WHAT == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    return train_step(state, status)


loop.train_step = failing
sys.exit(main(sys.argv[4:]))

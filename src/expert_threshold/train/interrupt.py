"""Lets signals stop a run after the current step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from .state import TrainState

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""The signals sent by Ctrl-C, by `kill`, by a closing terminal, and (the last two) by Slurm before a job ends."""
NOTICE = b"\nfinishing this step and saving; Ctrl-C again quits at once\n"

Handler = Callable[[int, FrameType | None], Any] | int


def handle(handler: Handler) -> dict[int, Any]:
    """Install a handler for the signals that stop a run, unless nohup ignores them. Return the old handlers."""
    numbers = [n for n in STOPPING if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in numbers}


class Interrupt:
    """A context in which signals raise KeyboardInterrupt. If `deferred` is set, the first one only sets `requested`.

    quiet: do not print a notice. Outside the main thread, no handler is installed, since Python does not allow it.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.deferred = False
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous = handle(self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def stops(self, state: TrainState) -> bool:
        """Return True if the run should stop. Ranks use the last step's status, so they all stop at the same step."""
        return self.requested if state.parallel.world is None else state.status.stop > 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Only a second Ctrl-C is deliberate: a closing terminal sends SIGHUP twice, and Slurm SIGTERM after SIGUSR1.
        if not self.deferred or (self.requested and number == signal.SIGINT):
            raise KeyboardInterrupt
        first, self.requested = not self.requested, True
        if first and not self.quiet:
            with suppress(OSError):  # the terminal may be gone
                os.write(2, NOTICE)  # print is unsafe here: the signal may have interrupted another print

"""Stops a run at a signal, after the step in progress."""

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
"""Ctrl-C, `kill`, a closed terminal, and what Slurm and its users send before a machine is taken away."""
NOTICE = b"\nfinishing this step and saving; Ctrl-C again quits at once\n"

Handler = Callable[[int, FrameType | None], Any] | int


def handle(handler: Handler) -> dict[int, Any]:
    """Install a handler for the signals that stop a run, but SIGHUP if nohup ignores it; return the previous ones."""
    numbers = [n for n in STOPPING if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in numbers}


class Interrupt:
    """A context in which signals raise KeyboardInterrupt; once `deferred`, the first only sets `requested`.

    quiet: print no notice. Python delivers signals to the main thread only; in other threads nothing is installed.
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
        """Return True once the run is to stop; all ranks agree on the step, by the status of the last one."""
        return self.requested if state.parallel.world is None else state.status.stop > 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Only a person insists: a closing terminal sends SIGHUP twice, and Slurm sends SIGTERM after SIGUSR1.
        if not self.deferred or (self.requested and number == signal.SIGINT):
            raise KeyboardInterrupt
        first, self.requested = not self.requested, True
        if first and not self.quiet:
            with suppress(OSError):  # the terminal may be what is gone
                os.write(2, NOTICE)  # a handler may not print in the middle of a print

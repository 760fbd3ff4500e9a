"""Stops a run at a signal, after the step in progress."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from .state import TrainState

NOTICE = b"\nfinishing this step and saving; interrupt again to quit at once\n"


class Interrupt:
    """A context in which SIGINT and SIGTERM raise KeyboardInterrupt; once `deferred`, the first only sets `requested`.

    quiet: print no notice. Python delivers signals to the main thread only; in other threads nothing is installed.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.deferred = False
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def stops(self, state: TrainState) -> bool:
        """Return True once the run is to stop; all ranks agree on the step, by the status of the last one."""
        return self.requested if state.parallel.world is None else state.status.stop > 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested or not self.deferred:
            raise KeyboardInterrupt
        self.requested = True
        if not self.quiet:
            os.write(2, NOTICE)  # a handler may not print in the middle of a print

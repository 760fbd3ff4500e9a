"""Signals that ask a run to stop."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

NOTICE = b"\nfinishing this step and saving; once more quits at once\n"


class Interrupt:
    """While entered, SIGINT and SIGTERM raise KeyboardInterrupt; with `deferred` set the first only sets `requested`.

    quiet: say nothing.

    Python tells the main thread alone of signals; in another one nothing is installed.
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

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested or not self.deferred:
            raise KeyboardInterrupt
        self.requested = True
        if not self.quiet:
            os.write(2, NOTICE)  # print is not to be called in the middle of a print

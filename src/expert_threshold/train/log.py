"""Shows the progress of a run: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

LIVE_INTERVAL = 0.2  # seconds between updates of the live line
PLAIN_INTERVAL = 5.0  # seconds between plain lines about a long task

Title = Callable[[float | None], str]
"""Returns the opening of a line, such as the name of the run; takes the seconds left, None if unknown."""


class RunConsole(Console):
    """A console that falls silent when its terminal, or the reader of its output, is gone: the run goes on."""

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            if error.errno != errno.EIO:  # what a terminal that is gone answers
                raise
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)  # else what is still buffered fails again when the process exits


def say(console: Console, text: str) -> None:
    """Print a text as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


class Display:
    """Shows the progress of a run or of other long work on `console`; with None it shows nothing.

    name: begins every line but those about steps, which begin with the title.
    """

    def __init__(self, console: Console | None, title: Title = lambda left: "", name: str = "") -> None:
        self._console = console
        self._prefix = f"{name}: " if name else ""
        self._title = title
        self._live: Progress | None = None
        self._task: TaskID | None = None
        self._shown = 0.0
        self._start = 0.0
        self._first = self._steps = 0
        self._summary = ""

    def __enter__(self) -> Display:
        if self._console is not None and self._console.is_terminal:
            columns = (BarColumn(10), TextColumn("{task.description}", markup=False))
            self._live = Progress(*columns, console=self._console, auto_refresh=False)
            self._task = self._live.add_task("")
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print one permanent line."""
        if self._console is not None:
            say(self._console, self._prefix + text)

    def task(self, what: str) -> Callable[[int, int], None]:
        """Return a function to call with the done and the total amount of a long task, which shows its progress."""
        self._shown = time.monotonic()
        first: tuple[int, float] | None = None  # a resumed download, for one, does not start at 0

        def progress(done: int, total: int) -> None:
            nonlocal first
            now = time.monotonic()
            first = first or (done, now)
            made, spent = done - first[0], now - first[1]
            text = f"{what}: {done / total:.0%}" + (f", {clock(spent * (total - done) / made)} left" if made else "")
            if self._live is not None:
                self._draw(self._prefix + text, done, total)
            elif self._is_time(PLAIN_INTERVAL):
                self.say(text)

        return progress

    def begin(self, step: int, steps: int) -> None:
        """Start the clock of the steps."""
        self._first, self._steps, self._start = step, steps, time.monotonic()

    def steps(self, steps: int) -> None:
        """Change the total number of steps."""
        self._steps = steps

    def step(self, step: int) -> None:
        """Show that a step was made."""
        left = self._left(step)
        # A narrow terminal cuts off the end, so the least important numbers come last.
        line = f"step {step}/{self._steps}  {clock(left)} left  {self._summary}"
        self._draw("\n".join(filter(None, [self._title(left), line])), step, self._steps)

    def record(self, step: int, record: dict[str, Any]) -> None:
        """Show the means since the last record."""
        self._summary = summary(record)
        if self._live is None:
            left = self._left(step)
            self._say_of_step(step, left, f"{self._summary}  {clock(left)} left")

    def measured(self, step: int, text: str) -> None:
        """Show the result of an evaluation."""
        self._say_of_step(step, None, text)

    def _say_of_step(self, step: int, left: float | None, text: str) -> None:
        self.say("  ".join(filter(None, [self._title(left), f"step {step}/{self._steps}", text])))

    def _left(self, step: int) -> float:
        """Return the seconds left at the pace of this session so far, validation and saving included."""
        pace = (time.monotonic() - self._start) / (step - self._first)
        return pace * (self._steps - step)

    def _draw(self, text: str, done: int, total: int) -> None:
        """Update the live line, but no more often than the eye can follow."""
        if self._live is not None and (self._is_time(LIVE_INTERVAL) or done >= total):
            assert self._task is not None
            self._live.update(self._task, completed=done, total=total, description=text, refresh=True)

    def _is_time(self, interval: float) -> bool:
        now = time.monotonic()
        if now - self._shown < interval:
            return False
        self._shown = now
        return True


def summary(record: dict[str, Any]) -> str:
    """Return the loss, the speed, the worst layer's load spread and the mean fanout in one line."""
    parts = [f"loss {record['loss']:.4f}", f"{record['tokens_per_second']:,.0f} tokens/s"]
    layers = record["layers"].values()
    if layers:
        parts.append(f"load spread {max(layer['load_spread'] for layer in layers):.2f}")
        parts.append(f"fanout {sum(layer['fanout_mean'] for layer in layers) / len(layers):.2f}")
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """Return h:mm:ss, or m:ss below an hour."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"

"""Shows the progress of a run, and logs its steps and evaluations to its folder and to a tracker.

Progress is shown as a live line on a terminal, and as plain lines elsewhere. Only the main rank writes. In
metrics.jsonl, a key is absent if the rule has no value for it, and a list contains one number per expert.
"""

from __future__ import annotations

import errno
import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from torch import Tensor

from ..evaluation import Validation
from ..files import corrupted_file_error
from ..install import install
from ..model import GPT
from ..runs import RunFolder
from .budget import Decision
from .config import TrackerName
from .state import Interval, Prepared

MAX_SKIPS = 10
"""The number of consecutive skipped steps after which a run ends."""
PACKAGES: dict[TrackerName, str] = {"tensorboard": "torch.utils.tensorboard", "trackio": "trackio", "wandb": "wandb"}
PLAIN_INTERVAL = 5.0  # seconds between plain lines about a long task

Title = Callable[[float | None], str]
"""Returns the start of a line, such as the run's name. Called with the seconds left, or None if they are unknown."""


class RunConsole(Console):
    """A console that goes silent if its terminal or the reader of its output disappears, so that the run continues."""

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            if error.errno != errno.EIO:  # the error of a terminal that is gone
                raise
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)  # otherwise flushing the buffers fails again at exit


def say(console: Console, text: str) -> None:
    """Print a text unchanged, without markup or wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


class Display:
    """Shows the progress of long-running tasks on a console, if there is one. name: printed before each line."""

    def __init__(self, console: Console | None, name: str = "") -> None:
        self._console = console
        self._prefix = f"{name}: " if name else ""
        self._live: Progress | None = None

    def __enter__(self) -> Display:
        if self._console is not None and self._console.is_terminal:
            columns = (BarColumn(10), TextColumn("{task.description}", markup=False))
            self._live = Progress(*columns, console=self._console, refresh_per_second=5)
            self._live.add_task("")
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
        """Return a function that, given the amount done and the total, shows the progress of a long task."""
        shown = time.monotonic()
        first: tuple[int, float] | None = None  # a resumed download does not start at 0

        def progress(done: int, total: int) -> None:
            nonlocal first, shown
            now = time.monotonic()
            first = first or (done, now)
            made, spent = done - first[0], now - first[1]
            text = f"{what}: {done / total:.0%}" + (f", {clock(spent * (total - done) / made)} left" if made else "")
            if self.draw(self._prefix + text, done, total):
                return
            if now - shown >= PLAIN_INTERVAL:
                shown = now
                self.say(text)

        return progress

    def draw(self, text: str, done: int, total: int) -> bool:
        """Update the live line. Return False if there is none."""
        if self._live is None:
            return False
        self._live.update(self._live.task_ids[0], completed=done, total=total, description=text, refresh=done >= total)
        return True


def summary(record: dict[str, Any]) -> str:
    """Return the loss, the speed, the worst layer's load spread and the mean fanout as one line."""
    parts = [f"loss {record['loss']:.4f}", f"{record['tokens_per_second']:,.0f} tokens/s"]
    layers = record["layers"].values()
    if layers:
        parts.append(f"load spread {max(layer['load_spread'] for layer in layers):.2f}")
        parts.append(f"fanout {sum(layer['fanout_mean'] for layer in layers) / len(layers):.2f}")
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """Format a duration as h:mm:ss, or as m:ss if it is shorter than an hour."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def train_record(model: GPT, interval: Interval) -> dict[str, Any]:
    """Return the mean of each per-step measurement (listed in docs/analysis.md) over an interval.

    The mean over all lines, weighted by their steps, is the mean over the run, however many steps each line covers.
    """
    means = {name: _rounded(value) for name, value in interval.means.items()}
    layers: dict[str, dict[str, Any]] = {str(layer): {} for layer, _ in model.moe_layers()}
    for name, value in means.items():
        layer, dot, measured = name.partition(".")
        if dot:
            layers[layer][measured] = value
    exact = {name: float(interval.means[name]) for name in ("loss", "cross_entropy")}
    return exact | {"grad_norm": means["grad_norm"], "steps": interval.steps, "layers": layers}


def validation_record(model: GPT, validation: Validation) -> dict[str, Any]:
    """Return the content of a validation's line in metrics.jsonl."""
    layers = {}
    for (layer, _), seen in zip(model.moe_layers(), validation.observations, strict=True):
        values = {name: _rounded(getattr(seen, name)) for name in ("usage", "load_spread", "fanout_mean")}
        layers[str(layer)] = values | {"fanout_counts": seen.fanout_counts.tolist()}
    return {name: getattr(validation, name) for name in ("loss", "bits_per_byte", "tokens")} | {"layers": layers}


def _rounded(values: Tensor) -> Any:
    """Return a number or a list of numbers, rounded to six significant digits to make lines half as long."""
    numbers = [float(f"{value:.6g}") for value in values.flatten().tolist()]
    return numbers if values.ndim else numbers[0]


Track = Callable[[int, Mapping[str, float]], None]
"""Called with a step and a flattened line of metrics.jsonl, which has keys such as `train/layers/1/usage/0`."""


def require_tracker(name: TrackerName) -> None:
    """Raise ValueError if the tracker's package is not installed."""
    if name == "none":
        return
    try:
        importlib.import_module(PACKAGES[name])
    except ImportError as error:
        raise ValueError(
            f"track={name!r} needs a package that is not installed ({error}); run: {install('track')}, or use 'none'"
        ) from None


@contextmanager
def tracking(name: TrackerName, folder: RunFolder, config: Mapping[str, Any], step: int) -> Iterator[Track | None]:
    """Open the named tracker for a run that continues after `step`. Yield None for 'none'.

    TensorBoard writes event files to the run folder, and hides any later steps in earlier files. trackio and W&B log to
    a run that is named after the folder, in the project `expert-threshold`. W&B also stores its files in the folder.
    """
    if name == "none":
        yield None
        return
    package = importlib.import_module(PACKAGES[name])
    if name == "tensorboard":
        with package.SummaryWriter(str(folder.path / "tensorboard"), purge_step=step + 1) as writer:

            def track(step: int, values: Mapping[str, float]) -> None:
                for path, value in values.items():
                    writer.add_scalar(path, value, step)

            yield track
        return
    # Folders with the same name in different locations are different runs.
    options: dict[str, Any] = {"resume": "allow" if step > 0 else "never"}
    if name == "wandb":
        options["dir"] = folder.path
        if (latest := folder.path / "wandb" / "latest-run").exists():  # a link to [offline-]run-DATE-ID
            options["id"] = latest.resolve().name.rpartition("-")[2]
    run = package.init(project="expert-threshold", name=folder.path.name, config=dict(config), **options)
    try:
        yield lambda step, values: run.log(dict(values), step=step)
    finally:
        run.finish()


def flatten(record: Any, name: str) -> dict[str, float]:
    """Return all numbers in a record, keyed by their paths."""
    if isinstance(record, list):
        record = dict(enumerate(record))
    if isinstance(record, Mapping):
        return {path: v for key, item in record.items() for path, v in flatten(item, f"{name}/{key}").items()}
    return {name: float(record)} if isinstance(record, int | float) else {}


class DivergedError(ValueError):
    """Raised if the loss, the scores or the gradients were not finite in too many consecutive steps."""


class RunLog:
    """Appends to metrics.jsonl, passes the same numbers to a tracker, and prints what happens.

    done: the steps at which each kind of evaluation was done. last: the loss and bits per byte of the last validation,
    each None if unknown. title: returns the start of each line about a step.
    """

    def __init__(
        self, folder: RunFolder, prepared: Prepared, display: Display, title: Title, track: Track | None
    ) -> None:
        self.display = display
        self._folder, self._title, self._track = folder, title, track
        self._state, self._record = prepared.state, prepared.record
        state = prepared.state
        self._first, self._start = state.step, time.monotonic()
        self._summary = ""
        done, last, dead = state.parallel.ranks.from_main(lambda: _logged(folder, state.step))
        self.last: tuple[float | None, float | None] = (last[0], last[1])
        self.done: dict[str, set[int]] = {kind: set(steps) for kind, steps in done.items()}
        self._dead: set[tuple[int, int]] = set(map(tuple, dead))
        if prepared.extended is not None:
            self._write("event", {"event": "extended", "steps": state.steps, "reason": prepared.extended})
            display.say(prepared.extended)

    def step(self) -> None:
        """Show that a step has finished, and log it if it was skipped or if metrics are due.

        Raises DivergedError after ten skipped steps in a row.
        """
        state = self._state
        if state.not_finite:
            event = {"event": "skipped_step", "in_a_row": state.skipped_in_a_row, "reason": state.not_finite}
            self._write("event", event)
            self.display.say(f"step {state.step}: {state.not_finite}; the step was skipped and changed nothing")
        if state.skipped_in_a_row >= MAX_SKIPS:
            self._write("event", {"event": "diverged"})
            optim = state.optimizers.config
            raise DivergedError(
                f"{MAX_SKIPS} steps in a row were skipped, most recently step {state.step}, because "
                f"{state.not_finite}; train with smaller learning rates than matrix_lr={optim.matrix_lr}, "
                f"embed_lr={optim.embed_lr}, head_lr={optim.head_lr}, from the start or with "
                f"--init-from {self._folder.path}"
            )
        # The average pace of this session includes validation and saving.
        pace = (time.monotonic() - self._start) / (state.step - self._first)
        left = pace * (state.steps - state.step)
        # A narrow terminal cuts off the end, so the least important numbers come last.
        logged = state.is_due(state.config.log_every) and self._metrics()
        line = f"step {state.step}/{state.steps}  {clock(left)} left  {self._summary}"
        text = "\n".join(filter(None, [self._title(left), line]))
        if not self.display.draw(text, state.step, state.steps) and logged:
            self._say(f"{self._summary}  {clock(left)} left", left)

    def _say(self, text: str, left: float | None = None) -> None:
        """Print a line about this step. left: the seconds left, or None if they are unknown."""
        step = f"step {self._state.step}/{self._state.steps}"
        self.display.say("  ".join(filter(None, [self._title(left), step, text])))

    def _metrics(self) -> bool:
        """Log the means over the steps since the last call. Return False if all of these steps were skipped."""
        state = self._state
        interval = state.take_interval()
        if interval is None:
            return False
        record = train_record(state.model, interval) | {
            "learning_rate": state.learning_rates(),
            "tokens": state.tokens,
            "tokens_per_second": interval.tokens_per_second,
            "seconds": state.seconds,
            "skipped": state.skipped,
        }
        self._write("train", record)
        self._summary = summary(record)
        for layer, values in record["layers"].items():  # warn once about each expert that gets no tokens
            for expert, usage in enumerate(values["usage"]):
                if usage == 0 and (int(layer), expert) not in self._dead:
                    self._dead.add((int(layer), expert))
                    self._write("event", {"event": "dead_expert", "layer": int(layer), "expert": expert})
                    what = f"expert {expert} of layer {layer} got no token in the last {interval.steps} steps"
                    self.display.say(f"warning: {what}")
        return True

    def revised_steps(self, decision: Decision, before: int) -> None:
        """Report that the run now has `decision.steps` steps, and record this in config.json for a later resume."""
        budget = self._state.budget
        if abs(decision.steps - before) > 0.01 * before:
            self.display.say(
                f"step {self._state.step}: {clock(decision.seconds)} of {clock(budget.seconds or 0)} used; "
                f"{decision.steps:,} steps fit, not {before:,}"
            )
        self._record["train"] |= {"steps": decision.steps}
        self._record["time"] |= {"decisions": [list(each) for each in budget.decisions]}
        if self._state.parallel.ranks.is_main:
            self._folder.write_config(self._record)

    def validation(self, validation: Validation, elapsed: float) -> None:
        """Log a validation at this step. elapsed: the run's time, in seconds, when the validation had finished."""
        state = self._state
        self._write("validation", validation_record(state.model, validation) | {"elapsed": elapsed})
        self.last = validation.loss, validation.bits_per_byte
        self._say(f"validation loss {validation.loss:.4f}  {validation.bits_per_byte:.4f} bits per byte")

    def core(self, core: dict[str, Any]) -> None:
        """Log the CORE results of this step. `metric` is the mean centred accuracy over all tasks."""
        names = ("rows", "accuracy", "centred", "cropped", "sequences")
        tasks = {label: {name: task[name] for name in names} for label, task in core["tasks"].items()}
        self._write("core", {"metric": core["metric"], "baselines": core["baselines"], "tasks": tasks})
        self._say(f"CORE {core['metric']:.4f}")

    def _write(self, split: str, record: dict[str, Any]) -> None:
        if not self._state.parallel.ranks.is_main:
            return
        self._folder.metrics.append({"step": self._state.step, "split": split} | record)
        if self._track is not None:
            self._track(self._state.step, flatten(record, split))


@contextmanager
def run_log(folder: RunFolder, prepared: Prepared, display: Display, title: Title) -> Iterator[RunLog]:
    """Write config.json and the tokenizer, remove the metrics of steps after the checkpoint, and yield the log."""
    state = prepared.state

    def begin() -> None:
        folder.write_config(prepared.record)
        if state.step == 0:
            folder.write_tokenizer(prepared.tokenizer)
        folder.metrics.truncate_after(state.step)

    name: TrackerName = state.config.track if state.parallel.ranks.is_main else "none"
    with tracking(name, folder, prepared.record, state.step) as opened:
        state.parallel.ranks.from_main(begin)
        yield RunLog(folder, prepared, display, title, opened)


def _logged(folder: RunFolder, step: int) -> tuple[dict[str, list[int]], list[float | None], list[tuple[int, int]]]:
    """Return the steps of each kind of evaluation, the results of the last validation, and the dead experts."""
    records = folder.metrics.read()
    with corrupted_file_error(folder.metrics.path, "restore it from a backup, or delete that line"):
        last: list[float | None] = [None, None]
        for record in records:
            if record["split"] == "validation":
                numbers = record["loss"], record["bits_per_byte"]
                last = [None if number is None else float(number) for number in numbers]
        done = {kind: [r["step"] for r in records if r["split"] == kind] for kind in ("validation", "core")}
        saved = (path.stem.removeprefix("step_") for path in folder.samples.glob("step_*.txt"))
        done["sample"] = [int(of_step) for of_step in saved if of_step.isdecimal() and int(of_step) <= step]
        dead = [(int(r["layer"]), int(r["expert"])) for r in records if r.get("event") == "dead_expert"]
        return done, last, dead

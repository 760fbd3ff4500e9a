"""Logs a run's steps and evaluations to its folder, a tracker and the console; only the main rank writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ..evaluation import Validation
from ..files import corrupted_file_error
from ..runs import RunFolder
from .budget import Decision
from .config import TrackerName
from .log import Display, clock
from .prepare import Prepared
from .records import core_record, train_record, validation_record
from .state import TrainState
from .track import Track, flatten, tracking

MAX_SKIPS = 10
"""A run ends after this many skipped steps in a row."""


class DivergedError(ValueError):
    """Raised where training has no finite loss or gradients any more."""


class RunLog:
    """Appends to metrics.jsonl, passes the same numbers to a tracker, and prints what happens.

    validations: loss and bits per byte of every validation so far, by step. core_steps, samples: the steps at which
    CORE was evaluated and a sample written. record: the content of config.json.
    """

    def __init__(
        self, folder: RunFolder, state: TrainState, record: dict[str, Any], display: Display, track: Track | None
    ) -> None:
        self._folder = folder
        self._state = state
        self._record = record
        self._display = display
        self._track = track
        self._is_main = state.parallel.is_main
        validations, core_steps, dead, samples = state.parallel.from_main(lambda: _logged(folder))
        self.validations: dict[int, tuple[float | None, float | None]] = {step: (a, b) for step, a, b in validations}
        self.core_steps: set[int] = set(core_steps)
        self.samples: set[int] = set(samples)
        self._dead: set[tuple[int, int]] = {(layer, expert) for layer, expert in dead}

    def step(self) -> None:
        """Log a skipped step and skipped text, if any. Raises DivergedError after ten skipped steps in a row."""
        state = self._state
        if state.not_finite:
            self._write(
                "event",
                {"event": "skipped_step", "in_a_row": state.skipped_in_a_row, "reason": state.not_finite},
            )
            self._display.say(f"step {state.step}: {state.not_finite}; the step was skipped and changed nothing")
        if state.skipped_in_a_row >= MAX_SKIPS:
            self._write("event", {"event": "diverged"})
            optim = state.optimizers.config
            raise DivergedError(
                f"{MAX_SKIPS} steps in a row were skipped, the last of them step {state.step}, since "
                f"{state.not_finite}; train with smaller learning rates than matrix_lr={optim.matrix_lr}, "
                f"embed_lr={optim.embed_lr}, head_lr={optim.head_lr}, from the start or with "
                f"--init-from {self._folder.path}"
            )
        self.skipped_text(state.loader.take_skipped())

    def extended(self, note: str | None) -> None:
        """Log that the run was extended, if it was."""
        if note is not None:
            self._write("event", {"event": "extended", "steps": self._state.steps, "reason": note})
            self._display.say(note)

    def skipped_text(self, reasons: Iterable[str]) -> None:
        """Log the reasons for which shards, or parts of them, were skipped."""
        for reason in reasons:
            self._write("event", {"event": "skipped_text", "reason": reason})
            self._display.say(f"skipped: {reason}")

    def metrics(self) -> None:
        """Log the means over the steps since the last call, unless all of them were skipped."""
        state = self._state
        interval = state.take_interval()
        if interval is None:
            return
        record = train_record(state.model, interval) | {
            "learning_rate": state.learning_rates(),
            "tokens": state.tokens,
            "tokens_per_second": interval.tokens_per_second,
            "seconds": state.seconds,
            "skipped": state.skipped,
        }
        self._write("train", record)
        self._display.record(state.step, record)
        self._dead_experts(record)

    def _dead_experts(self, record: dict[str, Any]) -> None:
        """Warn of each expert that got no token, once."""
        for layer, values in record["layers"].items():
            for expert, usage in enumerate(values["usage"]):
                if usage == 0 and (int(layer), expert) not in self._dead:
                    self._dead.add((int(layer), expert))
                    self._write("event", {"event": "dead_expert", "layer": int(layer), "expert": expert})
                    self._display.say(
                        f"warning: expert {expert} of layer {layer} got no token in the last {record['steps']} steps"
                    )

    def revised_steps(self, decision: Decision, before: int) -> None:
        """Log that the run now has `decision.steps` steps, and keep them in config.json for when it is resumed."""
        budget = self._state.budget
        if decision.steps != before:
            self._display.steps(decision.steps)
        if abs(decision.steps - before) > 0.01 * before:
            self._display.say(
                f"step {self._state.step}: {clock(decision.seconds)} of {clock(budget.seconds or 0)} are used; "
                f"{decision.steps:,} steps fit, not {before:,}"
            )
        self._record["train"] |= {"steps": decision.steps}
        self._record["time"] |= {"decisions": [list(each) for each in budget.decisions]}
        if self._is_main:
            self._folder.write_config(self._record)

    def validation(self, validation: Validation) -> None:
        """Log a validation at this step."""
        state = self._state
        self._write("validation", validation_record(state.model, validation))
        self.validations[state.step] = validation.loss, validation.bits_per_byte
        self._display.measured(
            state.step, f"validation loss {validation.loss:.4f}  {validation.bits_per_byte:.4f} bits per byte"
        )

    def core(self, core: dict[str, Any]) -> None:
        """Log CORE at this step."""
        record = core_record(core)
        self._write("core", record)
        self._display.measured(self._state.step, f"CORE {record['metric']:.4f}")

    def _write(self, split: str, record: dict[str, Any]) -> None:
        if not self._is_main:
            return
        self._folder.metrics.append({"step": self._state.step, "split": split} | record)
        if self._track is not None:
            self._track(self._state.step, flatten(record, split))


@contextmanager
def run_log(folder: RunFolder, prepared: Prepared, display: Display, tracker: TrackerName) -> Iterator[RunLog]:
    """Write config.json and the tokenizer, drop metrics of steps after the checkpoint, and open the log."""
    state = prepared.state

    def begin() -> None:
        folder.write_config(prepared.record)
        if state.step == 0:
            folder.write_tokenizer(prepared.tokenizer)
        folder.metrics.truncate_after(state.step)

    name: TrackerName = tracker if state.parallel.is_main else "none"
    with tracking(name, folder, prepared.record, state.step) as opened:
        state.parallel.from_main(begin)
        log = RunLog(folder, state, prepared.record, display, opened)
        log.skipped_text(prepared.skipped)
        log.extended(prepared.extended)
        yield log


def _logged(folder: RunFolder) -> tuple[list[Any], list[int], list[Any], list[int]]:
    """Return the validations, the steps at which CORE was evaluated, the dead experts, and the steps of samples."""
    records = folder.metrics.read()
    with corrupted_file_error(folder.metrics.path, "restore it from a copy, or delete that line"):
        return (
            [
                [r["step"], _number(r["loss"]), _number(r["bits_per_byte"])]
                for r in records
                if r["split"] == "validation"
            ],
            [r["step"] for r in records if r["split"] == "core"],
            [[int(r["layer"]), int(r["expert"])] for r in records if r.get("event") == "dead_expert"],
            [int(path.stem.removeprefix("step_")) for path in folder.samples.glob("step_*.txt")],
        )


def _number(value: Any) -> float | None:
    """Return a number as JSON holds it, null where it was not finite. Raises TypeError for anything else."""
    return None if value is None else float(value)

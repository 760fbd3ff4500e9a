"""Does the work between steps (validation, text samples and CORE), decides when it is due, and times it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter as now
from typing import Any

from ..data import Tokenizer, Tokens
from ..evaluation import ModelScorer, Results, ask_core, evaluate
from ..files import replace_file
from ..model import GPT
from ..runs import RunFolder, load_model
from .budget import Between, Decision
from .config import TrainConfig
from .interrupt import Interrupt
from .log import RunLog
from .saving import Saver
from .state import Prepared, TrainState, random_state, restore_random_state

Sample = Callable[[GPT, Tokenizer, int], str]
"""Returns text that the model generates after a step. The caller of `train` provides this function."""

Validated = Callable[[int, float], None]
"""Called with the step and the loss of each validation. An exception from it ends the run."""


class Timer:
    """Records the time of a run in `state.elapsed` and in its budget. The timer starts when it is created."""

    def __init__(self, state: TrainState, validation: Tokens | None) -> None:
        self._state = state
        self._between = _work_between_steps(state.config, validation, state.model.config.context)
        self._start = now() - state.elapsed

    @property
    def elapsed(self) -> float:
        """The seconds spent in all sessions so far, excluding preparation and pauses."""
        return now() - self._start

    @contextmanager
    def measure(self, work: str | None = None) -> Iterator[None]:
        """Time a step or, if `work` is given, the named work between steps."""
        before = now()
        yield
        self._state.budget.took(now() - before, work)
        self._state.elapsed = self.elapsed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time that is spent in the context from the run's time."""
        before = now()
        yield
        self._start += now() - before

    def revise_steps(self, log: RunLog) -> None:
        """Revise the number of steps if there is a time budget and this is due. The main rank decides for all ranks."""
        state = self._state
        if state.budget.seconds is None:
            return
        decided = state.parallel.ranks.from_main(lambda: state.budget.decide(state.step, state.elapsed, self._between))
        if decided is not None:
            before, decision = state.steps, Decision(*decided)
            state.budget.decisions.append(decision)
            log.revised_steps(decision, before)


def _work_between_steps(config: TrainConfig, validation: Tokens | None, context: int) -> dict[str, Between]:
    """Return the work between steps, keyed by name. A token takes a third as long in validation as in a step."""
    work = {"checkpoint": Between(config.checkpoint_every)}
    if config.eval_every is not None and validation is not None:
        tokens = min(len(validation), config.eval_tokens or math.inf)
        per_step = config.batch_size * config.accumulation * context
        work["validation"] = Between(config.eval_every, tokens / per_step / 3)
    if config.sample_every is not None:
        work["sample"] = Between(config.sample_every)
    return work


class _InterruptedError(Exception):
    """Raised when a signal interrupts a long task that can be resumed."""


@dataclass
class Evaluations:
    """The evaluations that a run performs between its steps.

    All ranks validate together. Only the main rank writes samples and evaluates CORE, while the others wait.
    """

    folder: RunFolder
    prepared: Prepared
    sample: Sample | None
    saver: Saver
    log: RunLog
    timer: Timer
    interrupt: Interrupt
    validated: Validated | None

    def __post_init__(self) -> None:
        self.state = self.prepared.state
        self.config, self.parallel = self.state.config, self.state.parallel
        config = self.config
        self.every = {"validation": config.eval_every, "sample": config.sample_every, "core": config.core_every}

    def run_due(self) -> None:
        """Validate, write a sample and evaluate CORE, each only if it is due at this step and has not been done yet."""
        if self._is_due("validation"):
            with self.timer.measure("validation"):
                self._validate()
            self.log.done["validation"].add(self.state.step)
        if self.parallel.splits_model and self.need_checkpoint():
            self.saver.finish()  # the main rank reads the model from this checkpoint
        if self._is_due("sample"):
            with self.timer.measure("sample"):
                self.parallel.ranks.from_main(self._write_sample)
            self.log.done["sample"].add(self.state.step)
        if self._is_due("core"):
            with self.timer.paused():  # a run's time budget does not include CORE
                completed = self.parallel.ranks.from_main(self._evaluate_core)
            if completed:
                self.log.done["core"].add(self.state.step)
            else:  # ranks stop here rather than after the next step, at which CORE is not due
                self.state.status = self.state.status._replace(stop=1)

    def are_due(self) -> bool:
        """Return True if an evaluation is due at this step and has not been done yet."""
        return any(map(self._is_due, self.every))

    def need_checkpoint(self) -> bool:
        """Return True if CORE is due, or a sample from a model that no rank holds whole. Both read a checkpoint."""
        return self._is_due("core") or (self.parallel.splits_model and self._is_due("sample"))

    def _is_due(self, kind: str) -> bool:
        return self.state.is_due(self.every[kind]) and self.state.step not in self.log.done[kind]

    def _validate(self) -> None:
        assert self.prepared.validation is not None
        validation = evaluate(
            self.state.model, self.prepared.validation, self.prepared.tokenizer, batch_size=self.config.batch_size,
            max_tokens=self.config.eval_tokens, group=self.parallel.world,
            progress=self.log.display.task("validating"),
        )  # fmt: skip
        self.log.validation(validation, self.timer.elapsed)
        if self.validated is not None:
            self.validated(self.state.step, validation.loss)

    def _write_sample(self) -> None:
        assert self.sample is not None
        state = self.state
        random = random_state(state.device)
        text = self.sample(self._full_model(), self.prepared.tokenizer, state.step)
        restore_random_state(random, state.device)
        state.model.train()
        self.folder.samples.mkdir(exist_ok=True)
        replace_file(self.folder.samples / f"step_{state.step:06d}.txt", text.encode())

    def _evaluate_core(self) -> bool:
        """Evaluate CORE. Return False if a signal interrupts it; the completed tasks are kept in evaluation.json."""

        def progress(task: str) -> Callable[[int, int], None]:
            show = self.log.display.task(f"CORE, {task}")

            def advance(done: int, total: int) -> None:
                if self.interrupt.requested and done < total:
                    raise _InterruptedError
                show(done, total)

            return advance

        model = self._full_model()
        try:
            core: dict[str, Any] = ask_core(
                Results(self.folder.path, model, self.prepared.tokenizer, self.state.step),
                self.prepared.core,
                ModelScorer(model, self.prepared.tokenizer),
                progress,
                max_per_task=self.config.core_max_per_task,
            )
        except _InterruptedError:
            return False
        self.log.core(core)
        return True

    def _full_model(self) -> GPT:
        """Return the whole model, which is loaded from this step's checkpoint if no rank holds it. Main rank only."""
        state = self.state
        if not self.parallel.splits_model:
            return state.model
        return load_model(self.folder.path, state.step, state.device, state.model.compute_dtype)[0]

"""Validation, text samples and CORE: which of them are due after a step, and the work itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..data import Tokenizer
from ..evaluation import ModelScorer, Results, ask_core, evaluate
from ..model import GPT
from ..runs import RunFolder, load_model
from ..runs.files import replace_file
from .interrupt import Interrupt
from .log import Display
from .prepare import Prepared
from .run_log import RunLog
from .saving import Saver
from .state import random_state, restore_random_state
from .timer import Timer

Sample = Callable[[GPT, Tokenizer, int], str]
"""Returns text that the model writes after a step; the caller of `train` provides it."""


class _InterruptedError(Exception):
    """A signal interrupted a long, resumable task."""


class Evaluations:
    """The evaluations that a run makes between its steps.

    All ranks validate together; the main rank alone writes samples and evaluates CORE while the others wait.
    """

    def __init__(
        self,
        folder: RunFolder,
        prepared: Prepared,
        sample: Sample | None,
        saver: Saver,
        log: RunLog,
        timer: Timer,
        display: Display,
        interrupt: Interrupt,
    ) -> None:
        self._folder = folder
        self._state = prepared.state
        self._config = prepared.state.config
        self._parallel = prepared.state.parallel
        self._tokenizer = prepared.tokenizer
        self._text = prepared.validation
        self._tasks = prepared.core
        self._sample = sample
        self._saver = saver
        self._log = log
        self._timer = timer
        self._display = display
        self._interrupt = interrupt

    def run_due(self) -> None:
        """Validate, write a sample and evaluate CORE, each if it is due at this step and not done yet."""
        if self._is_validation_due():
            with self._timer.measure("validation"):
                self._validate()
        if self._parallel.splits_model and self.need_checkpoint():
            self._saver.finish()  # the main rank reads the model from it
        if self._is_sample_due():
            with self._timer.measure("sample"):
                self._parallel.from_main(self._write_sample)
        if self._is_core_due():
            with self._timer.paused():  # the time that a run is given does not include CORE
                completed = self._parallel.from_main(self._evaluate_core)
            if completed:
                self._log.core_steps.add(self._state.step)

    def are_due(self) -> bool:
        """Returns True if something is due at this step and not done yet."""
        return self._is_validation_due() or self._is_sample_due() or self._is_core_due()

    def need_checkpoint(self) -> bool:
        """Returns True if what is due needs a checkpoint first: CORE, and samples of a model that no rank has whole."""
        return self._is_core_due() or (self._parallel.splits_model and self._is_sample_due())

    def _is_validation_due(self) -> bool:
        return self._state.is_due(self._config.eval_every) and self._state.step not in self._log.validations

    def _is_sample_due(self) -> bool:
        due = self._state.is_due(self._config.sample_every)
        return due and not self._parallel.from_main(self._sample_path.exists)

    def _is_core_due(self) -> bool:
        due = self._state.is_at_end or self._state.is_due(self._config.core_every)
        return bool(self._tasks) and due and self._state.step not in self._log.core_steps

    def _validate(self) -> None:
        assert self._text is not None
        validation = evaluate(
            self._state.model,
            self._text,
            self._tokenizer,
            batch_size=self._config.batch_size,
            max_tokens=self._config.eval_tokens,
            group=self._parallel.world,
            progress=self._display.task("validating"),
        )
        self._log.validation(validation)

    def _write_sample(self) -> None:
        assert self._sample is not None
        state = self._state
        random = random_state(state.device)
        text = self._sample(self._full_model(), self._tokenizer, state.step)
        restore_random_state(random, state.device)
        state.model.train()
        self._folder.samples.mkdir(exist_ok=True)
        replace_file(self._sample_path, text.encode())

    @property
    def _sample_path(self) -> Path:
        return self._folder.samples / f"step_{self._state.step:06d}.txt"

    def _evaluate_core(self) -> bool:
        """Returns False if a signal interrupted it; evaluation.json then has the tasks completed so far."""

        def progress(task: str) -> Callable[[int, int], None]:
            show = self._display.task(f"CORE, {task}")

            def advance(done: int, total: int) -> None:
                if self._interrupt.requested and done < total:
                    raise _InterruptedError
                show(done, total)

            return advance

        model = self._full_model()
        try:
            core: dict[str, Any] = ask_core(
                Results(self._folder.path, model, self._state.step),
                self._tasks,
                ModelScorer(model, self._tokenizer),
                progress,
                max_per_task=self._config.core_max_per_task,
            )
        except _InterruptedError:
            return False
        self._log.core(core)
        return True

    def _full_model(self) -> GPT:
        """Returns the model on the main rank; where no rank has it whole, from the checkpoint of this step."""
        state = self._state
        if not self._parallel.splits_model:
            return state.model
        return load_model(self._folder.path, state.step, state.device, state.model.compute_dtype)[0]

"""The wall-clock time of a run, and the number of steps that still fit into it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter as now

from ..data import Tokens
from .budget import Between, Decision
from .config import TrainConfig
from .run_log import RunLog
from .state import TrainState


class Timer:
    """Measures a run's time into `state.elapsed` and its budget; starts when it is created.

    validation: the text that is validated on.
    """

    def __init__(self, state: TrainState, validation: Tokens | None) -> None:
        self._state = state
        self._between = _work_between_steps(state.config, validation, state.model.config.context)
        self._start = now() - state.elapsed

    @property
    def elapsed(self) -> float:
        """Seconds of all sessions so far, without preparation and pauses."""
        return now() - self._start

    @contextmanager
    def measure(self, work: str | None = None) -> Iterator[None]:
        """Measure a step or, by its name, some work between steps."""
        before = now()
        yield
        self._state.budget.took(now() - before, work)
        self._state.elapsed = self.elapsed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time of the context."""
        before = now()
        yield
        self._start += now() - before

    def revise_steps(self, log: RunLog) -> None:
        """Revise the number of steps of a run with a time budget if that is due; the main rank decides for all."""
        state = self._state
        if state.budget.seconds is None:
            return
        decided = state.parallel.from_main(lambda: state.budget.decide(state.step, state.elapsed, self._between))
        if decided is not None:
            before, decision = state.steps, Decision(*decided)
            state.budget.take(decision)
            log.revised_steps(decision, before)


def _work_between_steps(config: TrainConfig, validation: Tokens | None, context: int) -> dict[str, Between]:
    """Return the work between steps, by name. Validation is forward alone, a third of a step's work per token."""
    work = {"checkpoint": Between(config.checkpoint_every)}
    if config.eval_every is not None and validation is not None:
        tokens = min(len(validation), config.eval_tokens or math.inf)
        per_step = config.batch_size * config.accumulation * context
        work["validation"] = Between(config.eval_every, tokens / per_step / 3)
    if config.sample_every is not None:
        work["sample"] = Between(config.sample_every)
    return work

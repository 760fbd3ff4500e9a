"""Decides how many steps a run takes. With a time budget, this follows from the measured speed and is revised later.

The learning rate is a function of progress, which rises linearly from 0 to 1 over the steps. After a revision, progress
continues linearly to 1 at the new end, so the schedule never jumps. At a steady speed, it is close to the schedule of a
run whose number of steps was known from the start. If a user extends a run, its learning rates do jump to the values of
a run of the new length, since at the end of a schedule they are too small to learn much more. Warmups keep their
original lengths. All decisions are kept in config.json and in checkpoints, so that a resumed run takes the same steps
at the same learning rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

SHARE_OF_STEPS = 0.85
"""The fraction of the time that is planned for steps before validation, samples and checkpoints have been timed."""
POINTS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
"""The fractions of the time or of the steps at which the number of steps is revised."""
COLD, ENOUGH = 3, 5
"""The number of steps at the start of a session that are not timed, and of timed steps needed to judge its speed."""
AIM, TOLERANCE = 0.97, 0.05
"""The fraction of the time that a decision aims to use, and the fraction of the remaining time by which a run may miss
this aim before its number of steps is changed."""


class Between(NamedTuple):
    """A kind of work that is done between steps and at the end of a run."""

    every: int | None  # interval in steps, or None if the work is only done at the end
    guess: float = 0.0  # the duration, in steps, that is assumed until it has been measured


class Decision(NamedTuple):
    """The decision, made at `step` after `seconds` of the run's time, that the run will take `steps` steps in total.

    extends: the learning rates jump to those that a run of `steps` steps has, instead of continuing without a jump.
    """

    step: int
    steps: int
    seconds: float
    extends: bool = False


class Budget:
    """The number of steps in a run, and the progress of each step in the learning-rate schedule.

    seconds: the time for the steps and the work between them, or None for a fixed number of steps. decisions: earlier
    decisions, if the run is resumed.
    """

    def __init__(self, steps: int, seconds: float | None = None, decisions: Sequence[Sequence[float]] = ()) -> None:
        self.seconds = seconds
        made = [Decision(int(step), int(of), float(gone), bool(extends)) for step, of, gone, extends in decisions]
        self.decisions = made or [Decision(0, steps, 0.0)]
        self._cold = COLD
        self._steps: list[float] = []  # seconds of each timed step of this session
        self._others: dict[str, list[float]] = {}

    @property
    def scheduled(self) -> int:
        """The number of steps in the first decision, for which the schedule was made. It is where `progress` ends."""
        return self.decisions[0].steps

    def steps_at(self, step: int) -> int:
        """Return the number of steps in the run, as decided up to `step`."""
        return next(decision.steps for decision in reversed(self.decisions) if decision.step <= step)

    def progress(self, step: int) -> float:
        """Return the progress at `step`, from 0 to `scheduled`. It equals `step` if there is only one decision."""
        made, left, begin, end = 0.0, float(self.scheduled), 0, self.scheduled
        for decision in self.decisions[1:]:
            if decision.extends and decision.step <= step:
                made = self.scheduled * decision.step / decision.steps
                left, begin, end = self.scheduled - made, decision.step, decision.steps
            elif decision.step < step and decision.steps != end:
                gone = left * (decision.step - begin) / (end - begin)
                made, left, begin, end = made + gone, left - gone, decision.step, decision.steps
        return made + left * (step - begin) / (end - begin)

    def took(self, seconds: float, what: str | None = None) -> None:
        """Record the duration of a step or, if `what` is given, of that kind of work between steps."""
        if what is not None:
            self._others.setdefault(what, []).append(seconds)
        elif self._cold:
            self._cold -= 1
        else:
            self._steps.append(seconds)

    def decide(self, step: int, gone: float, between: Mapping[str, Between]) -> Decision | None:
        """Return the next decision if one is due after `step`, otherwise None. gone: the seconds elapsed so far."""
        last = self.decisions[-1]
        if self.seconds is None or not last.step < step < last.steps:  # the run is at its end, or repeats earlier steps
            return None
        pace = _mean(self._steps[-max(ENOUGH, len(self._steps) // 5) :])
        known = {name: _mean(seconds) for name, seconds in self._others.items()}
        cost = {name: known.get(name, what.guess * pace) for name, what in between.items()}
        at_end = math.fsum(cost.values())
        if gone + at_end >= self.seconds:
            return Decision(step, step, gone)
        due = any(
            last.seconds < share * self.seconds <= gone or last.step < share * last.steps <= step for share in POINTS
        )
        if not due or len(self._steps) < ENOUGH:
            return None
        rate = pace + math.fsum(cost[name] / (what.every or math.inf) for name, what in between.items())
        left = AIM * self.seconds - gone - at_end
        if abs(left - rate * (last.steps - step)) <= TOLERANCE * (self.seconds - gone):
            return Decision(step, last.steps, gone)
        return Decision(step, step + max(1, int(left / rate)), gone)


def _mean(numbers: Sequence[float]) -> float:
    return math.fsum(numbers) / max(len(numbers), 1)

"""The steps of a run that is given a time: decided from the speed measured first, and again while the time is used.

The learning rate is a function of progress, which goes from 0 to 1 in a straight line over the steps; after another
decision it goes on in a straight line to 1 at the new end. So the schedule has no jump, and is the one of a run of so
many steps, nearly, where the speed is steady. Warmups stay those of the first decision. All decisions are
kept in config.json: a run that is resumed has the same steps at the same rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

SHARE_OF_STEPS = 0.85
"""Of the time, before anything is known of how long validation, samples and checkpoints take."""
POINTS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
"""Shares of the time, and of the steps, at which their number is decided again."""
COLD, ENOUGH = 3, 5
"""Steps of a session that are no measure of its speed; steps that are one, or else the last fifth of them."""
AIM, TOLERANCE = 0.97, 0.05
"""The share of the time that a decision aims at. While a run is going to miss it by no more than that share of the time
that is left, its steps stay as they are."""


class Between(NamedTuple):
    """What is done between steps, and at the end."""

    every: int | None  # so many steps; None is only at the end
    guess: float = 0.0  # how long it takes, in steps, until that is measured


class Decision(NamedTuple):
    step: int  # after so many
    steps: int  # the run has, from then on
    seconds: float  # of the time were gone


class Budget:
    """How many steps a run has, and where on its schedule each of them is.

    seconds: the time it is given, for steps and what is done between them; None is as many steps as were decided.
    decisions: earlier ones, of a run that is resumed.
    """

    def __init__(self, steps: int, seconds: float | None = None, decisions: Sequence[Sequence[float]] = ()) -> None:
        self.seconds = seconds
        made = [Decision(int(step), int(of), float(gone)) for step, of, gone in decisions]
        self.decisions = made or [Decision(0, steps, 0.0)]
        self._cold = COLD
        self._steps: list[float] = []  # seconds of each, of this session
        self._others: dict[str, list[float]] = {}

    @property
    def scheduled(self) -> int:
        """The steps that the schedule was made for, those of the first decision; `place` is in these."""
        return self.decisions[0].steps

    def steps_at(self, step: int) -> int:
        """The steps of the run, as decided until `step`."""
        return next(decision.steps for decision in reversed(self.decisions) if decision.step <= step)

    def place(self, step: int) -> float:
        """Progress at `step`, from 0 to `scheduled`; the step itself where nothing was decided since."""
        place, left, begin, end = 0.0, float(self.scheduled), 0, self.scheduled
        for decision in self.decisions[1:]:
            if decision.step < step and decision.steps != end:
                gone = left * (decision.step - begin) / (end - begin)
                place, left, begin, end = place + gone, left - gone, decision.step, decision.steps
        return place + left * (step - begin) / (end - begin)

    def took(self, seconds: float, what: str | None = None) -> None:
        """A step took so long or, named, something between two steps."""
        if what is not None:
            self._others.setdefault(what, []).append(seconds)
        elif self._cold:
            self._cold -= 1
        else:
            self._steps.append(seconds)

    def decide(self, step: int, gone: float, between: Mapping[str, Between]) -> Decision | None:
        """The next decision, if one is due after `step`. gone: seconds so far."""
        last = self.decisions[-1]
        if self.seconds is None or not last.step < step < last.steps:  # ended, or resumed from before the last one
            return None
        pace = _mean(self._steps[-max(ENOUGH, len(self._steps) // 5) :])
        cost = {
            name: _mean(self._others[name]) if name in self._others else what.guess * pace
            for name, what in between.items()
        }
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

    def take(self, decision: Decision) -> None:
        """From now on."""
        self.decisions.append(decision)


def _mean(numbers: Sequence[float]) -> float:
    return math.fsum(numbers) / max(len(numbers), 1)

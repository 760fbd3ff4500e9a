"""How flat the optimum of each option is that `et sweep` searched: one parabola for each, fitted to the better trials.

    python benchmarks/parabola.py FOLDER OF et sweep …

The loss near the optimum is fitted in an option's logarithm where it is searched so. Prints, for each method and
option, the optimum and the part of the searched range in which the loss stays within 0.005 nats of the least.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import run

from expert_threshold.compare.paired import student
from expert_threshold.compare.sweep import Trial

TOLERANCE = 0.005  # nats above the optimum up to which an option counts as equally good
NEAR_LOSS = 0.15  # nats above the best trial up to which a trial counts; farther off a parabola does not hold
NEAR = 0.5  # the share of these, the better ones, that is fitted
SPARE = 2  # trials beyond the number of coefficients without which nothing is fitted
SURE = 0.95  # confidence of the two-sided interval, by Student's t, that must exclude a curvature of 0


class Scale(NamedTuple):
    """The axis of a numeric option: its bounds, and whether it is searched by its logarithm."""

    low: float
    high: float
    log: bool

    def to_axis(self, value: float) -> float:
        return math.log(value) if self.log else value

    def from_axis(self, place: float) -> float:
        return math.exp(place) if self.log else place


class Optimum(NamedTuple):
    """The option's best value, and the part of the searched range where the loss is within TOLERANCE of its loss."""

    best: float
    low: float
    high: float


def better_trials(trials: Sequence[Trial], coefficients: int) -> list[Trial]:
    """Return the better half of the trials within NEAR_LOSS of the best, but twice `coefficients` if there are as many.

    Trials with the same options count once, since their loss is one measurement.
    """
    losses = {str(sorted(trial.options.items())): (trial.loss, trial) for trial in trials if trial.loss is not None}
    near = sorted(losses.values(), key=lambda each: each[0])
    near = [each for each in near if each[0] <= near[0][0] + NEAR_LOSS]
    return [trial for _, trial in near[: max(2 * coefficients, math.ceil(NEAR * len(near)))]]


def fit_optima(trials: Sequence[Trial], scales: Mapping[str, Scale]) -> dict[str, Optimum | None]:
    """Fit the loss by a constant and one parabola for each option; None for an option that shows no optimum."""
    found: dict[str, Optimum | None] = dict.fromkeys(scales)
    coefficients = 2 * len(scales) + 1
    near = better_trials(trials, coefficients)
    if not scales or len(near) < coefficients + SPARE:
        return found
    axes = np.array([[scale.to_axis(trial.options[name]) for name, scale in scales.items()] for trial in near])
    losses = np.array([trial.loss for trial in near])
    centre, spread = axes.mean(0), np.maximum(axes.std(0), 1e-12)
    x = (axes - centre) / spread
    columns = np.concatenate([np.ones((len(near), 1)), x, x**2], 1)
    solution, _, rank, _ = np.linalg.lstsq(columns, losses, rcond=None)
    if rank < coefficients:
        return found
    slopes, bends = np.split(solution[1:], 2)
    freedom = len(near) - coefficients
    variance = ((columns @ solution - losses) ** 2).sum() / freedom
    errors = np.sqrt(variance * np.diag(np.linalg.inv(columns.T @ columns)))[-len(scales) :]
    bent = bends > np.maximum(student(SURE, freedom) * errors, 0)
    for index in np.flatnonzero(bent):
        name, scale = list(scales.items())[index]
        place = centre[index] - spread[index] * slopes[index] / (2 * bends[index])
        reach = spread[index] * math.sqrt(TOLERANCE / bends[index])
        first, last = scale.to_axis(scale.low), scale.to_axis(scale.high)
        if first <= place <= last:
            # The range is cut off on the axis, where the ends of a nearly flat parabola's do not overflow.
            axis = (place, max(place - reach, first), min(place + reach, last))
            found[name] = Optimum(*map(scale.from_axis, axis))
    return found


def table(study: Mapping[str, Any]) -> dict[str, str]:
    """Return the optimum and its flat range by option, of a study of sweep.json."""
    scales = {name: Scale(**entry["scale"]) for name, entry in study["options"].items() if entry["scale"]}
    optima = fit_optima([Trial(**trial) for trial in study["trials"]], scales)
    shown = {name: found and "{:.3g} ({:.3g} to {:.3g})".format(*found) for name, found in optima.items()}
    return {name: text or "no optimum that these trials show" for name, text in shown.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    for folder in parser.parse_args().folders:
        for method, study in json.loads((folder / "sweep.json").read_bytes())["studies"].items():
            for option, text in table(study).items():
                print(f"{folder} {method} {option}: {text}")


if __name__ == "__main__":
    run(main)

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
from expert_threshold.compare.sweep import Trial, best_of

TOLERANCE = 0.005  # nats per token
"""The loss above its optimum up to which an option counts as equally good."""
NEAR = 0.5
"""The share of the trials within NEAR_LOSS of the best, the better ones, that the parabolas are fitted to."""

SPARE = 2
"""The number of trials beyond that of coefficients without which nothing is fitted."""

SURE = 0.95
"""The confidence of the two-sided interval, by Student's t, that must exclude a curvature of 0 for it to count."""

NEAR_LOSS = 0.15
"""The loss above the best of its sweep up to which a trial counts in a fit; farther off a parabola does not hold."""


class Scale(NamedTuple):
    """The axis of a numeric option: its bounds, and whether it is searched by its logarithm."""

    low: float
    high: float
    log: bool

    def to_axis(self, value: float) -> float:
        return math.log(value) if self.log else value

    def from_axis(self, place: float) -> float:
        return math.exp(place) if self.log else place


class Parabola(NamedTuple):
    """The fitted loss over one option, the others at their optimum: loss + curvature · (axis − optimum)².

    optimum, low, high: values of the option; from low to high, both inside the searched range, the loss stays within
    TOLERANCE of the optimum's. The axis is the option, or its logarithm on a logarithmic scale.
    """

    optimum: float
    low: float
    high: float
    loss: float
    curvature: float


class Fit(NamedTuple):
    """Parabolas by option, None for an option that shows no optimum inside its range.

    trials: how many were fitted; 0 if they are too few. residual: the standard deviation of their losses about the fit.
    """

    parabolas: Mapping[str, Parabola | None]
    trials: int
    residual: float | None


def _loss(trial: Trial) -> float:
    assert trial.loss is not None
    return trial.loss


def fit_parabolas(trials: Sequence[Trial], scales: Mapping[str, Scale]) -> Fit:
    """Fit the loss by one parabola for each numeric option, all added up, to the better trials.

    These are the better half of the trials within NEAR_LOSS of the best, but no fewer than twice the number of
    coefficients while there are as many. Trials with the same options count once, since their loss is one measurement.
    There are two coefficients for each option and a constant; nothing is fitted without SPARE trials more than
    coefficients.
    """
    coefficients = 2 * len(scales) + 1
    near = sorted({str(sorted(trial.options.items())): trial for trial in _near(trials)}.values(), key=_loss)
    near = near[: max(2 * coefficients, math.ceil(NEAR * len(near)))]
    if not scales or len(near) < coefficients + SPARE:
        return Fit(dict.fromkeys(scales), 0, None)
    axes = np.array([[scale.to_axis(trial.options[name]) for name, scale in scales.items()] for trial in near])
    losses = np.array([_loss(trial) for trial in near])
    centre = axes.mean(0)
    spread = np.maximum(axes.std(0), 1e-12)
    x = (axes - centre) / spread
    columns = np.concatenate([np.ones((len(near), 1)), x, x**2], 1)
    solution, _, rank, _ = np.linalg.lstsq(columns, losses, rcond=None)
    if rank < coefficients:
        return Fit(dict.fromkeys(scales), 0, None)
    constant, slopes, bends = solution[0], solution[1 : len(scales) + 1], solution[len(scales) + 1 :]
    freedom = len(near) - coefficients
    residual = math.sqrt(((columns @ solution - losses) ** 2).sum() / freedom)
    errors = residual * np.sqrt(np.diag(np.linalg.inv(columns.T @ columns)))[len(scales) + 1 :]
    bent = bends > np.maximum(student(SURE, freedom) * errors, 0)
    least = constant
    places: dict[str, tuple[float, float]] = {}  # of optima inside their ranges, with their reach
    for (name, scale), middle, unit, slope, bend, sure in zip(
        scales.items(), centre, spread, slopes, bends, bent, strict=True
    ):
        if sure:
            place, reach = middle - unit * slope / (2 * bend), unit * math.sqrt(TOLERANCE / bend)
            first, last = scale.to_axis(scale.low), scale.to_axis(scale.high)
            if first <= place <= last:
                places[name] = float(place), float(reach)
            at = (min(max(place, first), last) - middle) / unit
            least += slope * at + bend * at**2
    found: dict[str, Parabola | None] = dict.fromkeys(scales)
    for name, (place, reach) in places.items():
        scale, curvature = scales[name], TOLERANCE / reach**2
        low = scale.low if place - reach < scale.to_axis(scale.low) else scale.from_axis(place - reach)
        high = scale.high if place + reach > scale.to_axis(scale.high) else scale.from_axis(place + reach)
        found[name] = Parabola(scale.from_axis(place), low, high, float(least), curvature)
    return Fit(found, len(near), residual)


def _near(trials: Sequence[Trial]) -> list[Trial]:
    """Return the finished trials within NEAR_LOSS of the best."""
    best = best_of(trials)
    return [t for t in trials if best is not None and t.loss is not None and t.loss <= _loss(best) + NEAR_LOSS]


def table(study: Mapping[str, Any]) -> dict[str, str]:
    """Return the optimum and its flat range by option, of a study of sweep.json."""
    scales = {name: Scale(**entry["scale"]) for name, entry in study["options"].items() if entry["scale"]}
    fit = fit_parabolas([Trial(**trial) for trial in study["trials"]], scales)
    shown = {name: p and f"{p.optimum:.3g} ({p.low:.3g} to {p.high:.3g})" for name, p in fit.parabolas.items()}
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

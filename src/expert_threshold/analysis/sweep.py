"""The trials of a sweep: the best, how flat the optimum of each option is, and what transfers to other sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from .paired import student

TOLERANCE = 0.005  # nats per token
"""The loss above its optimum up to which an option counts as equally good."""
NEAR = 0.5
"""The share of the finished trials, the best ones, that the parabolas are fitted to, if that is enough of them."""

SPARE = 2
"""The number of trials beyond that of coefficients without which nothing is fitted."""

SURE = 0.95
"""The confidence of the two-sided interval, by Student's t, that must exclude a curvature of 0 for it to count."""

EDGE = 0.05
"""The share of a range, at each end, in which the best value may be the range's doing."""


class Scale(NamedTuple):
    """The axis of a numeric option: its bounds, and whether it is searched by its logarithm."""

    low: float
    high: float
    log: bool

    def to_axis(self, value: float) -> float:
        return math.log(value) if self.log else value

    def from_axis(self, place: float) -> float:
        return math.exp(place) if self.log else place

    def is_at_edge(self, value: float) -> bool:
        """Return True if the value lies in the first or last EDGE of the range, where a better one may lie outside."""
        place, low, high = map(self.to_axis, (value, self.low, self.high))
        return not EDGE <= (place - low) / (high - low) <= 1 - EDGE


class Trial(NamedTuple):
    """One choice of options and its outcome.

    state: finished, pruned (worse than the median on the way), diverged, or refused (options that contradict each
    other). options: values by name, texts for choices. loss: nats per token at the end, the mean over seeds; None
    unless finished. curve: step and validation loss, of the first seed. present: the preset's own options.
    """

    trial: int  # from 1
    state: str
    options: Mapping[str, Any]
    loss: float | None
    curve: Sequence[tuple[int, float]]
    seconds: float
    reason: str | None
    present: bool


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


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """Return the finished trial with the least loss, the first of equals; None if none has finished."""
    return min((trial for trial in trials if trial.loss is not None), key=_loss, default=None)


def _loss(trial: Trial) -> float:
    assert trial.loss is not None
    return trial.loss


def fit_parabolas(trials: Sequence[Trial], scales: Mapping[str, Scale]) -> Fit:
    """Fit the loss by one parabola for each numeric option, all added up, to the better half of the finished trials.

    The fit has two coefficients for each option and a constant; it needs SPARE trials more than that, and takes up to
    twice as many where half of the trials are fewer.
    """
    coefficients = 2 * len(scales) + 1
    finished = sorted((trial for trial in trials if trial.loss is not None), key=_loss)
    near = finished[: max(2 * coefficients, math.ceil(NEAR * len(finished)))]
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
    least = constant - (slopes[bent] ** 2 / (4 * bends[bent])).sum()
    found: dict[str, Parabola | None] = {}
    for (name, scale), middle, unit, slope, bend, sure in zip(
        scales.items(), centre, spread, slopes, bends, bent, strict=True
    ):
        found[name] = None
        if sure:
            place, reach = middle - unit * slope / (2 * bend), unit * math.sqrt(TOLERANCE / bend)
            first, last = scale.to_axis(scale.low), scale.to_axis(scale.high)
            if first <= place <= last:  # beyond, the exponential of a flat parabola's ends overflows
                low = scale.low if place - reach < first else scale.from_axis(float(place - reach))
                high = scale.high if place + reach > last else scale.from_axis(float(place + reach))
                optimum = scale.from_axis(float(place))
                found[name] = Parabola(optimum, low, high, float(least), float(bend / unit**2))
    return Fit(found, len(near), residual)


class Law(NamedTuple):
    """A fitted power law: value = constant · Π (size / reference)^exponent, by least squares of logarithms.

    references: the geometric mean of each size. errors: standard errors of the exponents. residuals: of the logarithm
    of each value.
    """

    constant: float
    references: Mapping[str, float]
    exponents: Mapping[str, float]
    errors: Mapping[str, float]
    residuals: Sequence[float]


def fit_power_law(sizes: Sequence[Mapping[str, float]], values: Sequence[float]) -> Law:
    """Return the power law of positive values in positive sizes; sizes that never change have no exponent.

    Raises ValueError, which says what is missing, for too few values or sizes that change only together.
    """
    names = [name for name in sizes[0] if len({each[name] for each in sizes}) > 1] if sizes else []
    if not names:
        raise ValueError("nothing differs between the folders; sweep at other sizes too")
    if len(values) < len(names) + 2:
        raise ValueError(
            f"{len(values)} values are too few for {', '.join(names)}: their exponents need {len(names) + 2}"
        )
    references = {name: math.exp(fmean(math.log(each[name]) for each in sizes)) for name in names}
    columns = np.array([[1.0, *(math.log(each[name] / references[name]) for name in names)] for each in sizes])
    logs = np.log(np.array(values, float))
    solution, _, rank, _ = np.linalg.lstsq(columns, logs, rcond=None)
    if rank < columns.shape[1]:
        raise ValueError(f"{', '.join(names)} change only together; sweep at sizes where each changes by itself")
    residuals = logs - columns @ solution
    variance = (residuals**2).sum() / (len(values) - len(solution))
    errors = np.sqrt(variance * np.diag(np.linalg.inv(columns.T @ columns)))
    return Law(
        math.exp(solution[0]),
        references,
        dict(zip(names, solution[1:].tolist(), strict=True)),
        dict(zip(names, errors[1:].tolist(), strict=True)),
        residuals.tolist(),
    )

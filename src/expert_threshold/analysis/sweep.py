"""The trials of a sweep: the best, how flat the optimum of each option is, and what transfers to other sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from .paired import student
from .sentences import counted

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
    other, or need more memory than there is). options: values by name, texts for choices. loss: nats per token at the
    end, the mean over seeds; None unless finished. curve: step and validation loss, of the first seed. present: the
    preset's own options.
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
    """Fit the loss by one parabola for each numeric option, all added up, to the better trials.

    These are the better half of the trials within NEAR_LOSS of the best, but no fewer than twice the number of
    coefficients while there are as many. There are two coefficients for each option and a constant; nothing is fitted
    without SPARE trials more than coefficients.
    """
    coefficients = 2 * len(scales) + 1
    near = sorted(_near(trials), key=_loss)
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


class SizeStudy(NamedTuple):
    """The trials of a method at one size. sizes: by name, such as d_model. scales: of the method's numeric options."""

    sizes: Mapping[str, float]
    scales: Mapping[str, Scale]
    trials: Sequence[Trial]


class Law(NamedTuple):
    """The optimum of an option as powers of sizes: constant · Π (size / reference)^exponent.

    references: the geometric mean of each size. errors: standard errors of the exponents. constant_error: that of the
    constant's logarithm. flat: the factor away from the optimum at which the loss is TOLERANCE above it. trials: how
    many were fitted. residual: the standard deviation of their losses about the fit.
    """

    constant: float
    constant_error: float
    references: Mapping[str, float]
    exponents: Mapping[str, float]
    errors: Mapping[str, float]
    flat: float
    trials: int
    residual: float


def fit_laws(sweeps: Sequence[SizeStudy]) -> tuple[dict[str, Law], dict[str, str]]:
    """Return the law of each option on a logarithmic range, and the reason for each that has none.

    One regression over the trials of all sweeps that are within NEAR_LOSS of the best of theirs. With x the logarithm
    of an option and z those of the sizes, each option adds κ (x − a − Σ b z)² to a loss that is each sweep's own; κ is
    the same at all sizes. Without its square, which is the sweep's own, this is linear in κ, κ a and κ b; standard
    errors of a and b follow from theirs to first order. So few trials of each size suffice. Numeric options without a
    law have one parabola at all sizes; choices count as noise.
    """
    options = dict.fromkeys(option for sweep in sweeps for option, scale in sweep.scales.items() if scale.log)
    sweeps = [sweep for sweep in sweeps if best_of(sweep.trials) is not None]
    if not sweeps:
        return {}, dict.fromkeys(options, "no trial has finished; search smaller learning rates")
    near = [(sweep, trial) for sweep in sweeps for trial in _near(sweep.trials)]
    columns = [np.array([float(sweep is other) for sweep, _ in near]) for other in sweeps]
    found: dict[str, tuple[int, dict[str, float]]] = {}
    reasons: dict[str, str] = {}
    for option in dict.fromkeys(option for sweep in sweeps for option in sweep.scales):
        having = [sweep for sweep in sweeps if option in sweep.scales]
        by_logarithm = option in options and all(sweep.scales[option].low > 0 for sweep in having)
        to_axis = math.log if by_logarithm else float
        x = np.array([to_axis(t.options[option]) if sweep in having else 0.0 for sweep, t in near])
        if not by_logarithm:
            if option in options:
                reasons[option] = "one of its ranges does not begin above 0; search it anew"
            columns += [x**2, x]
            continue
        names = [name for name in having[0].sizes if len({sweep.sizes[name] for sweep in having}) > 1]
        references = {name: math.exp(fmean(math.log(sweep.sizes[name]) for sweep in having)) for name in names}
        if reason := _undetermined(having, references):
            reasons[option] = reason
            columns += [x**2, x]
            continue
        found[option] = len(columns), references
        z = np.array([_logs(sweep.sizes, references) for sweep, _ in near])
        columns += [x**2, x, *(x[:, None] * z).T]
    matrix, losses = np.stack(columns, 1), np.array([_loss(trial) for _, trial in near])
    if len(losses) < len(columns) + SPARE or np.linalg.matrix_rank(matrix) < len(columns):
        few = f"{counted(len(losses), 'trial')} within {NEAR_LOSS} of the best of their size are too few; make more"
        return {}, reasons | dict.fromkeys(found, few)
    solution = np.linalg.lstsq(matrix, losses, rcond=None)[0]
    freedom = len(losses) - len(columns)
    residual = math.sqrt(((matrix @ solution - losses) ** 2).sum() / freedom)
    covariance = residual**2 * np.linalg.inv(matrix.T @ matrix)
    laws = {}
    for option, (place, references) in found.items():
        bend = solution[place]
        if bend <= student(SURE, freedom) * math.sqrt(covariance[place, place]):
            reasons[option] = "the trials show no optimum; search a wider range, or make more"
            continue
        powers, errors = [], []
        for at in range(place + 1, place + 2 + len(references)):
            powers.append(float(-solution[at] / (2 * bend)))
            slope = np.zeros(len(solution))  # of the power over the coefficients
            slope[at], slope[place] = -1 / (2 * bend), solution[at] / (2 * bend**2)
            errors.append(math.sqrt(slope @ covariance @ slope))
        laws[option] = Law(
            math.exp(powers[0]),
            errors[0],
            references,
            dict(zip(references, powers[1:], strict=True)),
            dict(zip(references, errors[1:], strict=True)),
            math.exp(math.sqrt(TOLERANCE / bend)),
            len(losses),
            residual,
        )
    return laws, reasons


def _undetermined(sweeps: Sequence[SizeStudy], references: Mapping[str, float]) -> str | None:
    """Return why the sweeps' sizes determine no exponents; None if they do. references: of the sizes that differ."""
    names = ", ".join(references)
    if not references:
        return "nothing differs between the folders; sweep at other sizes too"
    if len(sweeps) <= len(references):
        return f"{len(sweeps)} sweeps are too few for {names}; one more than sizes is needed"
    design = np.array([[1.0, *_logs(sweep.sizes, references)] for sweep in sweeps])
    if np.linalg.matrix_rank(design) <= len(references):
        return f"{names} change only together; sweep at sizes where each changes by itself"
    return None


def _near(trials: Sequence[Trial]) -> list[Trial]:
    """Return the finished trials within NEAR_LOSS of the best."""
    best = best_of(trials)
    return [t for t in trials if best is not None and t.loss is not None and t.loss <= _loss(best) + NEAR_LOSS]


def _logs(sizes: Mapping[str, float], references: Mapping[str, float]) -> list[float]:
    return [math.log(sizes[name] / reference) for name, reference in references.items()]

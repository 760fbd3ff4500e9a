"""Statistics of differences paired by seed: mean, interval, test of equivalence and Holm's correction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean, stdev
from typing import Literal

import numpy as np

Verdict = Literal["lower", "higher", "equivalent", "open"]
FEW = 6
"""With fewer seeds than this, a family of differences shares one standard error, pooled over methods."""


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences with its 95 % interval by Student's t. Both ends are None for a single pair.

    verdict: equivalent if two one-sided tests at 5 % place the mean within the margin, that is, if its 90 % interval
    lies within the margin. Otherwise lower or higher if the 95 % interval excludes 0. A single pair is always open.
    """

    mean: float
    low: float | None
    high: float | None
    verdict: Verdict


@dataclass(frozen=True)
class Corrected:
    """The verdict on one of several differences, with the standard error that it is based on.

    freedom: degrees of freedom of the error.
    """

    verdict: Verdict
    error: float
    freedom: int


def paired(differences: Sequence[float], margin: float) -> Difference:
    """Return the mean of one or more differences, with its interval and verdict."""
    center = mean(differences)
    if len(differences) < 2:
        return Difference(center, None, None, "open")
    error = stdev(differences) / len(differences) ** 0.5
    half, narrow = (student(confidence, len(differences) - 1) * error for confidence in (0.95, 0.90))
    verdict: Verdict = "open"
    if abs(center) + narrow < margin:
        verdict = "equivalent"
    elif abs(center) > half:
        verdict = "lower" if center < 0 else "higher"
    return Difference(center, center - half, center + half, verdict)


def corrected(family: Sequence[Sequence[float]], margin: float) -> list[Corrected]:
    """Return the verdicts on several methods' differences to one baseline, each paired over two or more seeds.

    Holm's correction is applied to both tests of `paired`, so that the probability that any claim of a difference
    is wrong is at most 5 %, and likewise for claims of equivalence. Methods with equally few seeds share an error.
    """
    errors = [(stdev(each) / len(each) ** 0.5, len(each) - 1) for each in family]
    for count in {len(each) for each in family if len(each) < FEW}:
        alike = [each for each in family if len(each) == count]
        if len(alike) > 1:
            # The row of zeros is the baseline. Subtracting it changes only seed effects, which the residuals exclude.
            spread, freedom = residual_spread([[0.0] * count, *alike])
            pooled = (spread * (2 / count) ** 0.5, freedom)
            errors = [pooled if len(each) == count else error for each, error in zip(family, errors, strict=True)]
    means = [mean(each) for each in family]
    pairs = list(zip(means, errors, strict=True))
    differ = holm([2 * _tail(abs(center), *error) for center, error in pairs])
    equal = holm([_tail(margin - abs(center), *error) for center, error in pairs])
    verdicts: list[Verdict] = [
        "equivalent" if same <= 0.05 else "open" if other > 0.05 else "lower" if center < 0 else "higher"
        for center, other, same in zip(means, differ, equal, strict=True)
    ]
    return [Corrected(verdict, *error) for verdict, error in zip(verdicts, errors, strict=True)]


def residual_spread(losses: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Return the standard deviation of losses (methods, seeds) around the sum of a method effect and a seed effect, and
    its degrees of freedom.
    """
    x = np.array(losses)
    residual = x - x.mean(0) - x.mean(1, keepdims=True) + x.mean()
    freedom = (x.shape[0] - 1) * (x.shape[1] - 1)
    return float((residual**2).sum() / freedom) ** 0.5, freedom


def holm(probabilities: Sequence[float]) -> list[float]:
    """Return the p-values adjusted for multiple comparisons by Holm's step-down procedure."""
    adjusted, most = [0.0] * len(probabilities), 0.0
    for rank, place in enumerate(sorted(range(len(probabilities)), key=probabilities.__getitem__)):
        most = max(most, min(1.0, (len(probabilities) - rank) * probabilities[place]))
        adjusted[place] = most
    return adjusted


def _tail(distance: float, error: float, freedom: int) -> float:
    """Return the probability that Student's T exceeds distance / error."""
    angle = math.atan2(abs(distance), error * freedom**0.5)
    beyond = (1 - float(np.interp(angle, *_angles(freedom)))) / 2
    return beyond if distance > 0 else 1 - beyond


@cache
def student(confidence: float, freedom: int) -> float:
    """Return t such that |T| <= t with probability `confidence`, for Student's T with `freedom` degrees of freedom."""
    angles, share = _angles(freedom)
    return float(freedom**0.5 * np.tan(np.interp(confidence, share, angles)))


@cache
def _angles(freedom: int) -> tuple[np.ndarray, np.ndarray]:
    """Return angles a from 0 to π/2, and the probability that |T| <= √freedom · tan(a).

    The density of a is proportional to cos(a)^(freedom − 1).
    """
    angles = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angles) ** (freedom - 1)
    area = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return angles, area / area[-1]

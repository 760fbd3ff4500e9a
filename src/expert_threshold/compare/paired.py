"""Differences that are paired over seeds: their mean, its interval, and a test of equivalence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from statistics import mean, stdev
from typing import Literal, NamedTuple

import numpy as np

Verdict = Literal["lower", "higher", "equivalent", "open"]


class Difference(NamedTuple):
    """The mean of paired differences with its 95 % interval by Student's t; both ends are None with one pair.

    verdict: equivalent where the mean lies within the margin by two one-sided tests at 5 %, which holds if its 90 %
    interval does; else lower or higher where the 95 % interval excludes 0; else open, as it always is with one pair.
    """

    mean: float
    low: float | None
    high: float | None
    verdict: Verdict


def paired(differences: Sequence[float], margin: float) -> Difference:
    """Return the mean of the differences, at least one, with its interval and verdict."""
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


@cache
def student(confidence: float, freedom: int) -> float:
    """Return t such that |T| <= t with that probability, for Student's T with `freedom` degrees of freedom.

    With T = √freedom · tan(a) the density of a is proportional to cos(a)^(freedom − 1).
    """
    angles = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angles) ** (freedom - 1)
    area = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return float(freedom**0.5 * np.tan(np.interp(confidence, area / area[-1], angles)))

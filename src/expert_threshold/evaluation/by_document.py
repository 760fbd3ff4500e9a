"""Compares a model of variable fanout with static top k′ at the same mean fanout, by document losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
FEW = 10
"""With fewer documents, a bootstrap interval is too narrow to decide."""
Sums = npt.NDArray[np.float64]
"""(documents, 2): nats and routed experts (mean over layers), summed over each document's targets."""


class Comparison(NamedTuple):
    """A model's loss compared with static top k′, interpolated linearly between the two k′ around its mean fanout.

    difference: the model's loss minus the static loss, in nats per token, with a 95 % interval from a bootstrap over
    documents. lower: the model with the lower loss, or open if the interval contains 0 or there are too few documents.
    If the fanout exceeds the largest k′, static_loss and the fields after it are None.
    """

    fanout: float
    loss: float
    static_loss: float | None = None
    difference: float | None = None
    interval: tuple[float, float] | None = None
    lower: Literal["static", "variable", "open"] | None = None


def compare(static: Sequence[Sums], found: Sums, targets: Sequence[int], seed: int = 0) -> Comparison:
    """Return the comparison. static: the sums for k′ = 0, 1, …; targets: number of targets in each document."""
    draws = np.random.default_rng(seed).multinomial(len(targets), [1 / len(targets)] * len(targets), RESAMPLES)
    weights = np.vstack([np.ones(len(targets)), draws])  # the sample, then its resamples, shared by all models
    weights /= (weights @ np.array(targets))[:, None]
    loss, fanout = (weights @ found).T
    if fanout[0] > len(static) - 1:
        return Comparison(float(fanout[0]), float(loss[0]))
    curve = np.stack([weights @ sums[:, 0] for sums in static])
    below = np.clip(fanout.astype(int), 0, len(static) - 2)
    at, share = np.arange(len(fanout)), fanout - below
    beside = (1 - share) * curve[below, at] + share * curve[below + 1, at]
    low, high = np.quantile((loss - beside)[1:], [0.025, 0.975]).tolist()
    return Comparison(
        float(fanout[0]),
        float(loss[0]),
        float(beside[0]),
        float(loss[0] - beside[0]),
        (low, high),
        "open" if len(targets) < FEW or low <= 0 <= high else "static" if low > 0 else "variable",
    )

"""Compares a model with variable fanout to static top-k′ routing at the same mean fanout, document by document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
FEW = 10
"""With fewer documents than this, a bootstrap interval is too narrow to decide anything."""
Sums = npt.NDArray[np.float64]
"""(documents, 2): nats and routed experts (the mean over layers), each summed over the targets of a document."""


class Comparison(NamedTuple):
    """A model's loss compared with the loss of static top-k′ routing at the same mean fanout.

    static_loss: interpolated linearly between the two k′ around the fanout. difference: loss minus static_loss, in nats
    per token. interval: the 95 % interval of a bootstrap over documents. lower: the model with the lower loss, or
    "open" if the interval contains 0 or there are too few documents. All four are None if the fanout exceeds every k′.
    """

    fanout: float
    loss: float
    static_loss: float | None = None
    difference: float | None = None
    interval: tuple[float, float] | None = None
    lower: Literal["static", "variable", "open"] | None = None


def compare(static: Sequence[Sums], found: Sums, targets: Sequence[int], seed: int = 0) -> Comparison:
    """Compare a model with static top k′. static: sums for k′ = 0, 1, …; targets: number of targets per document."""
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
    lower: Any = "open" if len(targets) < FEW or low <= 0 <= high else "static" if low > 0 else "variable"
    ours, own_loss, static_loss, gap = (float(number[0]) for number in (fanout, loss, beside, loss - beside))
    return Comparison(ours, own_loss, static_loss, gap, (low, high), lower)

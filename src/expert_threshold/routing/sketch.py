"""A sketch of each expert's score distribution: quantiles at a few usages, from which cutoffs for any usage follow.

A usage u is the share of tokens above a cutoff. Quantiles are kept at equal steps of logit(u) = log(u / (1 − u)), on
which those of bell-shaped distributions are nearly linear; beyond the last level they are extrapolated linearly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

STEP, LAST = 0.5, 7.5
"""Levels are logits of usage from −LAST to LAST, that is 0.06 % to 99.94 % of the tokens."""
LEVELS = round(2 * LAST / STEP) + 1
MOST_USAGE = 1 / (1 + math.exp(-LAST))
"""The largest usage at which quantiles are kept."""
SAMPLE = 2048
"""The maximum number of tokens sorted, which costs less than one k-th largest of a training batch."""


@torch.no_grad()
def sketch(scores: Tensor) -> Tensor:
    """Return the scores (levels, experts), falling, that each level's share of tokens exceeds; scores: (tokens,
    experts).

    Uses at most SAMPLE tokens, evenly spaced. The spacing is odd, so that all positions occur in sequences of an even
    length. The h-th largest of n estimates the quantile at usage h / (n + 1), its expectation for independent tokens.
    """
    stride = -(-len(scores) // SAMPLE) | 1
    ordered = _ascending(scores.detach()[::stride])
    n = len(ordered)
    levels = torch.linspace(-LAST, LAST, LEVELS, device=scores.device)
    place = ((-levels).sigmoid() * (n + 1) - 1).clamp(0, n - 1)  # counted from the smallest
    below = place.floor()
    lower, upper = ordered[below.long()], ordered[place.ceil().long()]
    return torch.lerp(lower, upper, (place - below)[:, None])


def quantile(sketch: Tensor, usage: float) -> Tensor:
    """Return the cutoffs (experts,) that a share `usage` of the tokens exceeds: no token at 0, every token at 1."""
    if not 0 < usage < 1:
        return sketch.new_full(sketch.shape[1:], -math.inf if usage else math.inf)
    place = (math.log(usage / (1 - usage)) + LAST) / STEP
    i = min(max(math.floor(place), 0), LEVELS - 2)
    return sketch[i] + (place - i) * (sketch[i + 1] - sketch[i])


@torch.library.custom_op("expert_threshold::ascending", mutates_args=())
def _ascending(scores: Tensor) -> Tensor:
    """Return each expert's scores in ascending order; opaque to the compiler."""
    if scores.device.type != "cpu":
        return scores.sort(dim=0).values
    columns = scores.numpy().T.copy()  # numpy sorts with vector instructions; torch does not
    columns.sort(axis=1)
    return torch.from_numpy(columns).T.contiguous()


@_ascending.register_fake
def _(scores: Tensor) -> Tensor:
    return torch.empty_like(scores, memory_format=torch.contiguous_format)

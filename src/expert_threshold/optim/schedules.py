"""Learning rates, momentum and weight decay as functions of the step and of the place on the schedule."""

from __future__ import annotations

import math
from collections.abc import Callable

from .config import OptimConfig


def linear(place: float, steps: int, end: float, cooldown: float = 1.0) -> float:
    """Return the fraction of the peak at `place` of `steps`: a straight line from 1 to `end`, without cooldown."""
    return 1 + (end - 1) * place / steps


def warmup_stable_decay(place: float, steps: int, end: float, cooldown: float = 0.2) -> float:
    """Return the fraction of the peak at `place` of `steps`: 1, then a straight line to `end` over the cooldown.

    cooldown: its share of the steps.
    """
    return end + (1 - end) * min(1.0, 1 / cooldown * (steps - place) / steps)


SCHEDULES: dict[str, Callable[[float, int, float, float], float]] = {
    "linear": linear,
    "warmup_stable_decay": warmup_stable_decay,
}


def falling(place: float, steps: int, end: float, config: OptimConfig) -> float:
    """Return the fraction of the peak at `place` of `steps`, by the configured schedule, from 1 to `end`."""
    return SCHEDULES[config.schedule](place, steps, end, config.cooldown)


def warmup(step: int, warmup_steps: int) -> float:
    """Return (step + 1) / warmup_steps, at most 1; the first step is not zero."""
    return min(1.0, (step + 1) / max(1, warmup_steps))


def momentum_at(step: int, place: float, steps: int, config: OptimConfig) -> float:
    """Return Muon's momentum: linear from momentum_start at step 0 to momentum at step momentum_warmup_steps.

    With momentum_end, it then goes there in proportion as the learning rates fall.
    """
    risen = min(1.0, step / config.momentum_warmup_steps) if config.momentum_warmup_steps else 1.0
    momentum = (1 - risen) * config.momentum_start + risen * config.momentum
    if config.momentum_end is None:
        return momentum
    left = falling(place, steps, 0.0, config)
    return left * momentum + (1 - left) * config.momentum_end


def weight_decay_at(place: float, steps: int, config: OptimConfig) -> float:
    """Return the weight decay at `place` of `steps`: constant, or half a cosine from its value to 0."""
    if config.weight_decay_schedule == "constant":
        return config.weight_decay
    return config.weight_decay * (1 + math.cos(math.pi * place / steps)) / 2

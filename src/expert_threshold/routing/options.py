"""Checks of the rules' options: invalid values raise a ValueError that names option, value and remedy."""

from __future__ import annotations

import math


def require(holds: bool, name: str, value: object, remedy: str) -> None:
    """Raise ValueError `name=value remedy` unless `holds`."""
    if not holds:
        raise ValueError(f"{name}={value!r} {remedy}")


def is_whole(value: object, *, at_least: int) -> bool:
    """Return True for an int of at least `at_least`; a bool is not one."""
    return type(value) is int and value >= at_least


def is_number(value: object, *, at_least: float) -> bool:
    """Return True for a finite number of at least `at_least`; a bool is not one."""
    return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value) and value >= at_least


def check_experts(num_experts: int, experts_per_token: float) -> None:
    """Raise ValueError unless the options that every rule has are valid."""
    require(is_whole(num_experts, at_least=1), "num_experts", num_experts, "must be a whole number of at least 1")
    require(
        is_number(experts_per_token, at_least=0) and 0 < experts_per_token <= num_experts,
        "experts_per_token",
        experts_per_token,
        f"must be a number above 0 and at most num_experts={num_experts}",
    )


def whole_fanout(experts_per_token: float, rule: str) -> int:
    """Return experts_per_token as an int, for rules with a fixed fanout. rule: its name in prose.

    Raises ValueError for a fraction.
    """
    use = max(int(experts_per_token), 1)
    remedy = (
        f"must be whole in {rule}, since every token takes that many; use {use}, or expert_choice or expert_threshold"
    )
    require(experts_per_token == int(experts_per_token), "experts_per_token", experts_per_token, remedy)
    return int(experts_per_token)


def check_decay(decay: float) -> None:
    """Raise ValueError unless the decay of a running mean is valid."""
    require(
        is_number(decay, at_least=0) and decay < 1,
        "decay",
        decay,
        "must lie in [0, 1): it is the share of the old mean kept per optimizer step",
    )


def check_cutoff(pool: object, decay: float, debias: bool) -> None:
    """Raise ValueError unless the options of a running cutoff are valid."""
    require(
        pool in ("sequence", "batch", "global") or is_whole(pool, at_least=1),
        "pool",
        pool,
        "is unknown; use 'sequence', 'batch', 'global' or a number of tokens",
    )
    check_decay(decay)
    require(isinstance(debias, bool), "debias", debias, "must be True or False")

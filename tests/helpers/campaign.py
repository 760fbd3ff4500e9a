"""Campaigns: one property tried many times, each trial drawn from its own seed.

`make test` makes a few trials where no other test has the property, `make soak` all of them, times ET_SOAK. A failure
names its seed, and ET_TRIAL=SEED repeats that trial alone.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

SCALE = float(os.environ.get("ET_SOAK", "1"))
done: dict[str, tuple[int, int]] = {}
"""Trials and failures of each campaign, for the summary."""


def trials(full: int, few: int = 0) -> pytest.MarkDecorator:
    """Parametrize a test by its number of `trials`: `few` in `make test`, `full` in `make soak`."""
    soak = pytest.param(max(1, round(full * SCALE)), marks=pytest.mark.soak)
    return pytest.mark.parametrize("trials", [few, soak] if few else [soak])


def campaign(name: str, count: int, trial: Callable[[random.Random], object]) -> None:
    """Make `count` trials, then fail if any failed."""
    failures: list[Exception] = []
    only = os.environ.get("ET_TRIAL")
    for seed in range(count) if only is None else [int(only)]:
        try:
            trial(random.Random(seed))
        except Exception as error:
            error.add_note(f"trial {seed} of {name}; ET_TRIAL={seed} repeats it alone")
            failures.append(error)
            print(f"trial {seed} of {name} failed: {error}")  # at once, under pytest -s
        done[name] = seed + 1, len(failures)
    if failures:
        raise ExceptionGroup(f"{len(failures)} of {count} trials of {name} failed", failures[:5])

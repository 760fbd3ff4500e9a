"""Every fast path against its definition, on the card; `checks_*.py` hold the checks, one kind a file.

A check returns its row, with the numbers it compared, or raises AssertionError with what differs. On a CPU those that
are about CUDA are recorded as unavailable.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from . import checks_of_backends, checks_of_models, checks_of_runs, checks_of_selection
from .setting import Case, Row, Setting
from .tuning import use_one_tile

FIELDS = ("checked",)


def cases(setting: Setting) -> Iterator[Case]:
    """Yield what everything else stands on first. Kernels are given tiles: tuning them for toy sizes takes minutes."""
    if setting.cuda:
        with suppress(ImportError):
            use_one_tile(setting)
    yield from checks_of_backends.cases(setting)
    yield from checks_of_selection.cases(setting)
    yield from checks_of_models.cases(setting)
    yield from checks_of_runs.cases(setting)


def lines(rows: dict[str, Row]) -> list[str]:
    """Return how much was checked, and the largest errors by dtype."""
    found = [f"{len(rows)} kinds of checks hold, {sum(row['checked'] for row in rows.values())} comparisons"]
    errors = [(row["error"], name) for name, row in rows.items() if row.get("error") is not None]
    if errors:
        worst, name = max(errors)
        found.append(f"largest error against float64: {worst:.2g} of the norm, {name}")
    return found

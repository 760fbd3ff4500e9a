"""Formats numbers and lists for sentences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .plain import Data


def counted(count: int, what: str) -> str:
    """Return a count with its noun: 1 thread, 2 threads."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def short(count: float) -> str:
    """Return a count with up to three significant digits and a unit: 16M, 2.43B."""
    unit = ""
    for larger in "kMBT":
        if count >= 999.5:
            count, unit = count / 1000, larger
    return f"{count:.3g}{unit}"


def pool_size(tokens: int) -> str:
    """Return a pool size in the paper's notation: 2k is 2 · 1024, 2M is 2 · 1024²."""
    if tokens % 2**20 == 0:
        return f"{tokens // 2**20}M"
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens:,}"


def listed(parts: Sequence[str]) -> str:
    """Join parts as `a, b and c`."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def each(data: Data, phrase: Callable[[Data], str]) -> str:
    """Return a phrase about each method of a figure's data, such as `0.1 in TC, 0.2 in EC 2k and 0.3 in ET`."""
    return listed([f"{phrase(entry)} in {entry['method']}" for entry in data["methods"]])


def signed(number: float | None, digits: int = 3) -> str:
    """Return a signed number such as +0.012 or −0.012; zero has no sign, and a missing number is a dash."""
    if number is None:
        return "–"
    text = f"{number:+.{digits}f}"
    return text.replace("-", "−") if float(text) else text[1:]


def fixed(number: float | None, digits: int) -> str:
    """Format a number with `digits` decimals, or return a dash if it is missing."""
    return "–" if number is None else f"{number:,.{digits}f}"


def of_deviation(distance: float, deviation: float) -> str:
    """Return a clause that compares a distance with the scores' standard deviation, which is 0 in a collapsed run."""
    if not deviation:
        return ", and the scores of an expert are all equal"
    return f", which is {percent(distance / deviation)} of the scores' standard deviation"


def percent(share: float) -> str:
    return f"{100 * share:.3g} %" if share < 9.995 else f"{100 * share:,.0f} %"

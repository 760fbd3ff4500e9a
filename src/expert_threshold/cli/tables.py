"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..train.log import RunConsole

LONG = 24
"""Width of a text that is no number, such as a path."""


def console_for_tables() -> Console:
    """Return a console as wide as the terminal, or wide enough for the tables if there is no terminal."""
    return RunConsole(width=None if RunConsole().is_terminal else 120)


def table(headers: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    """Return a table of names and numbers, given as markup. In a narrow terminal, all wrap but the numbers."""
    table = Table(headers[0], box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.columns[0].overflow = "fold"
    table.columns[0].min_width = min(12, max((len(line[0]) for line in lines), default=0))
    for header, texts in zip(headers[1:], list(zip(*lines, strict=True))[1:], strict=True):
        words = map(len, header.split())
        widest = max(min(len(header), 8), *words, *(Text.from_markup(text).cell_len for text in texts))
        table.add_column(header, justify="right", width=widest if widest < LONG else None, overflow="fold")
    for line in lines:
        table.add_row(*line)
    return table

"""`et recipes`: lists the runs of the paper's tables with their results, and runs with other projects' settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..analysis.sentences import fixed, pool_size, short
from ..config import resolve
from ..plan import costs
from ..recipes import RECIPES
from ..routing import rule_to_dict
from .options import Option, parse

OPTIONS = [Option("json", bool, False, "Print JSON instead of a table.")]
WIDE = 120  # terminal columns that leave room for summaries and sources
DESCRIPTION = (
    "List the recipes for et train --recipe: runs of the paper, and runs with other projects' settings.\n\n"
    "pool: the tokens that compete for an expert, or over which load is measured. effective: the number of tokens that "
    "a cutoff averages over, which is the tokens per step divided by 1 − β. CE and CORE are the paper's results."
)


def run(arguments: Sequence[str]) -> None:
    """Print all recipes."""
    given = parse("et recipes", DESCRIPTION, OPTIONS, arguments)
    rows = [describe(name) for name in RECIPES]
    if given.get("json"):
        print(json.dumps(rows))
    else:
        console = Console()
        console.print(_table(rows, console.width >= WIDE))
        console.print("et train --recipe NAME starts one; a PRESET and --tokens scale it down.", markup=False)


def describe(name: str) -> dict[str, Any]:
    """Return a recipe with its pools in tokens, and the paper's results."""
    recipe = RECIPES[name]
    config = resolve(recipe.preset, recipe=name)
    cost = costs(config)
    return {
        "name": name,
        "summary": recipe.summary,
        "preset": recipe.preset,
        "rule": rule_to_dict(config.model.rule),
        **{key: cost[key] for key in ("steps", "tokens", "tokens_per_step", "pool", "effective_pool")},
        "paper": recipe.reported._asdict(),
    }


def _table(rows: Sequence[dict[str, Any]], wide: bool) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("recipe", no_wrap=True)
    if wide:
        table.add_column("what")
    for name in ("tokens", "pool", "effective", "CE", "CORE"):
        table.add_column(name, justify="right", no_wrap=True)
    if wide:
        table.add_column("in the paper")
    for row in rows:
        paper = row["paper"]
        sizes = (short(row["tokens"]), _size(row["pool"]), _size(row["effective_pool"]))
        loss = fixed(paper["cross_entropy"], 3)
        core = "–" if paper["core"] is None else f"{paper['core']:g}"
        what, where = ([f"{row['preset']}, {row['summary']}"], [paper["where"]]) if wide else ([], [])
        table.add_row(row["name"], *what, *sizes, loss, core, *where)
    return table


def _size(tokens: int | None) -> str:
    return "–" if tokens is None else short(tokens) if tokens >= 10_000_000 else pool_size(tokens)

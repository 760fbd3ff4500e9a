"""The table that `et evaluate` prints, with a column for each run and a row for each number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ..analysis.sentences import fixed

Result = Mapping[str, Any]
VALIDATION = "validation"
"""Names a run's own validation text in the table."""


def table(
    results: Mapping[str, Result], validation: bool, texts: Mapping[str, str], labels: Sequence[str], harness: bool
) -> Table:
    """Return the table. results: each run's evaluation.json, keyed by path. labels: the tasks of CORE.

    texts: the keys under which results on other texts are saved, keyed by the name to show. Each accuracy is followed
    by its centred accuracy, and each loss with training pools by its gap to the causal loss on the same tokens.
    """
    shown = Table()
    shown.add_column(no_wrap=True)
    for path in results:
        shown.add_column(Text(path, overflow="fold"), justify="right")

    def add(name: str, cells: Iterable[str]) -> None:
        shown.add_row(Text(name), *cells)

    found = list(results.values())
    losses = {VALIDATION: [result["validation"] for result in found]} if validation else {}
    losses |= {name: [result["data"][place] for result in found] for name, place in texts.items()}
    for name, measured in losses.items():
        pooled = [each.get("training_pools", {}) for each in measured]
        add(f"{name} tokens", (f"{each['tokens']:,}" for each in measured))
        for key, title in (("loss", "loss"), ("bits_per_byte", "bits per byte")):
            add(f"{name} {title}", (fixed(each[key], 4) for each in measured))
            if any(pooled):
                add("  by training pools, gap", (_show_gap(each, key) for each in pooled))
    for label in labels:
        tasks = [result["core"]["tasks"][label] for result in found]
        add(label, (f"{task['accuracy']:.4f} {task['centred']:+.4f}" for task in tasks))
    if labels:
        asked = [[result["core"]["tasks"][label] for label in labels] for result in found]
        add("CORE", (fixed(result["core"]["metric"], 4) for result in found))
        add("prompts cropped", map(_show_cropped, asked))
    for task, metrics in found[0]["harness"].items() if harness else ():
        for metric in metrics:
            add(f"{task} {metric}", (_show_metric(result["harness"][task][metric]) for result in found))
    return shown


def _show_gap(pooled: Result, key: str) -> str:
    if pooled.get(key) is None:
        return "–"
    return f"{pooled[key]:.4f} {pooled[f'causal_{key}'] - pooled[key]:+.4f}"


def _show_metric(found: Result) -> str:
    return fixed(found["value"], 4) + (f" ± {found['stderr']:.4f}" if found["stderr"] is not None else "")


def _show_cropped(results: Sequence[Result]) -> str:
    cropped, sequences = (sum(result[name] for result in results) for name in ("cropped", "sequences"))
    return f"{cropped:,} of {sequences:,}"

"""Prints the paper's claims on losses beside what was measured here, as the table of docs/evidence.md.

    python benchmarks/evidence/claims.py

It reads the losses of single runs in docs/results. Differences are paired over three seeds; verdicts are corrected for
the number of comparisons by Holm's method within each column, with the standard error pooled over methods.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from expert_threshold.analysis.results import markdown
from expert_threshold.compare.paired import corrected, student

RESULTS = Path(__file__).parents[2] / "docs" / "results"
SMALL, QUICKSTART = "small-cpu/results.json", "rules/table/joined.json"
BASE = "expert_threshold"
MARGIN = 0.01


CLAIMS: dict[str, tuple[float, str | None, str]] = {
    "dense is worse": (0.158, "dense", "dense"),
    "token choice is worse": (0.049, "token_choice", "token_choice"),
    "so is token choice with the auxiliary loss": (0.048, "token_choice_aux", "token_choice_aux"),
    "so is loss-free token choice": (0.054, "token_choice_loss_free", "token_choice_loss_free"),
    "expert choice by sequence is worse": (0.066, "expert_choice_2k", "expert_choice_sequence"),
    "expert choice by batch is equal": (-0.001, "expert_choice_512k", "expert_choice_batch"),
    "normalising by fanout hurts": (0.040, "expert_threshold_fanout_norm", "expert_threshold (fanout norm)"),
    "omitting warmup does not change the loss": (0.000, *["expert_threshold_no_warmup"] * 2),
    "omitting the shared expert hurts": (0.018, None, "expert_threshold (0 shared)"),
}
"""Claims about methods: their loss minus expert threshold's in the paper (d12), and their names in both files."""


def losses(path: str) -> dict[str, list[float]]:
    """Return each method's losses by seed from a file of results."""
    runs: Any = json.loads((RESULTS / path).read_text(encoding="utf-8"))["runs"]
    if isinstance(runs, dict):
        return {method: [run["loss"] for run in each] for method, each in runs.items()}
    found: dict[str, list[float]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        found.setdefault(run["method"], []).append(run["loss"])
    return found


def verdict(paper: float, measured: str) -> str:
    """Return whether a claim holds: a difference that the paper reports, or its absence."""
    if abs(paper) < MARGIN:
        return {"equivalent": "holds", "open": "open"}.get(measured, "fails")
    return {"higher": "holds", "open": "open"}.get(measured, "fails")


def column(path: str, methods: Sequence[str | None], papers: Sequence[float]) -> list[str]:
    """Return the cells of a column: difference, 95 % interval without correction, and corrected verdict."""
    of = losses(path)
    family = {name: [a - b for a, b in zip(of[name], of[BASE], strict=True)] for name in methods if name}
    judged = dict(zip(family, corrected(list(family.values()), MARGIN), strict=True))
    cells = []
    for name, paper in zip(methods, papers, strict=True):
        if name is None:
            cells.append("")
            continue
        found = judged[name]
        half = student(0.95, found.freedom) * found.error
        cells.append(f"{mean(family[name]):+.3f} ± {half:.3f}, {verdict(paper, found.verdict)}")
    return cells


def table() -> str:
    """Return the table of claims in Markdown."""
    papers, small, quickstart = zip(*CLAIMS.values(), strict=True)
    cells = zip(CLAIMS, papers, column(SMALL, small, papers), column(QUICKSTART, quickstart, papers), strict=True)
    lines = [[words, f"{paper:+.3f}", *measured] for words, paper, *measured in cells]
    head = ["compared with expert threshold", "paper, d12", "paper's trunk, small", "`quickstart`"]
    return markdown(head, [[cell.replace("-0.", "−0.") for cell in line] for line in lines])


if __name__ == "__main__":
    print(table())

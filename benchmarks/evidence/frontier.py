"""Measures loss against load: which way of balancing has the lowest loss at a given load of the busiest expert?

    python benchmarks/evidence/frontier.py --data FOLDER/tokens --out FOLDER [--seeds 0 1] [--only NAME …]

Each setting of each family below is one run of `et train quickstart` with --tokens. Runs are judged by loss and by the
busiest expert's load over the mean in the worst layer, both in training after the first quarter and in causal
validation. FOLDER/records.jsonl holds one JSON line per finished run. If the command is repeated, it skips these runs
and resumes an interrupted one.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
from study import Record, parser, read, record_run, run_script

from expert_threshold.analysis.figures.style import INK, METHODS, WIDE, style
from expert_threshold.analysis.results import markdown

SOFTMAX = "--rule.gate softmax --rule.null-scores 16"
SHARED = "--threads 1 --eval-tokens 400000 --sample-every none"
# The standard deviation of a run's loss at 2M tokens beside what all methods of a seed share, from eight pairs of two
# methods (ladder.py). Residuals of these settings would understate it, since most are settings of one method.
SCATTER = 0.0078 / 2**0.5


def choices(rule: str, option: str, *values: object) -> dict[str, str]:
    """Return the options of each setting of a family: the rule, and one of the option's values."""
    return {str(value): f"--rule {rule} --rule.{option} {value}" for value in values}


LOSS = f"token_choice --rule.balance aux {SOFTMAX}"
FAMILIES = {
    "dense": {"": "--rule dense"},
    "auxiliary loss, softmax": choices(LOSS, "aux-strength", 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1),
    "auxiliary loss, sigmoid": choices("token_choice --rule.balance aux", "aux-strength", 0.001, 0.01, 0.03),
    "loss-free, sign": choices("token_choice --rule.balance loss_free", "bias-rate", 0.001, 0.003, 0.01, 0.03),
    "loss-free, proportional": choices(
        "token_choice --rule.balance loss_free_proportional", "bias-rate", 0.001, 0.003, 0.01, 0.03
    ),
    "capacity factor": choices(f"{LOSS} --rule.aux-strength 0.01", "capacity-factor", 1.0, 1.25, 1.5),
    "quantile balancing": {"sigmoid": "--rule quantile_balancing", "softmax": f"--rule quantile_balancing {SOFTMAX}"},
    "expert threshold": choices(f"expert_threshold {SOFTMAX}", "capacity-slack", 0.1, 0.25, 0.5, "none"),
    "expert threshold, warmup": choices(f"expert_threshold {SOFTMAX}", "warmup-steps", 0, 24, 195),
    "expert threshold, decay": choices(f"expert_threshold {SOFTMAX} --rule.estimator trend", "decay", 0.8, 0.9, 0.97),
    "expert threshold, mean": choices(
        f"expert_threshold {SOFTMAX} --rule.estimator mean", "capacity-slack", 0.1, 0.5, "none"
    ),
    "expert threshold, sigmoid": choices("expert_threshold", "capacity-slack", 0.1, 0.5, "none"),
    "expert choice": choices(f"expert_choice {SOFTMAX}", "pool", "sequence", 1024, "batch"),
}
"""The settings of each family by name, in the order in which the family's line connects them."""


class Cell(NamedTuple):
    """One setting over its seeds. error: the standard error of its loss, without what all settings of a seed share."""

    family: str
    setting: str
    seeds: int
    loss: float
    error: float
    load_training: float | None
    load_validation: float | None


def cells(records: list[Record]) -> list[Cell]:
    """Return each setting's estimates, in the order of the families. Raises ValueError if tokens or text differ."""
    if len({(record["tokens"], record["corpus"]) for record in records}) > 1:
        raise ValueError("the runs differ in number of tokens or in text; show one kind at a time")
    of = {(family, setting): [] for family, settings in FAMILIES.items() for setting in settings}
    for record in records:
        of[record["family"], record["setting"]].append(record)
    groups = {name: runs for name, runs in of.items() if runs}
    names, seeds = list(groups), sorted({record["seed"] for record in records})
    design = np.zeros((len(records), len(names) + len(seeds)))
    for row, record in zip(design, records, strict=True):
        row[[names.index((record["family"], record["setting"])), len(names) + seeds.index(record["seed"])]] = 1
    inverse = np.linalg.pinv(design)
    fit = inverse @ np.array([record["loss"] for record in records])
    found = []
    for number, (name, runs) in enumerate(groups.items()):
        contrast = np.r_[np.eye(len(names))[number], np.full(len(seeds), 1 / len(seeds))]  # at the seeds' mean
        error = SCATTER * float(np.linalg.norm(contrast @ inverse))
        loads = [
            None if runs[0][load] is None else fmean(run[load] for run in runs)
            for load in ("load_training", "load_validation")
        ]
        found.append(Cell(*name, len(runs), float(contrast @ fit), error, *loads))
    return found


def table(found: list[Cell]) -> str:
    """Return a Markdown table. A load is bold if no other setting has both a lower loss and a lower load."""
    lines = []
    for cell in found:
        words = [f"{cell.loss:.4f} ± {cell.error:.4f}"]
        for load in ("load_training", "load_validation"):
            mine, others = getattr(cell, load), [each for each in found if getattr(each, load) is not None]
            best = mine is not None and not any(o.loss < cell.loss and getattr(o, load) < mine for o in others)
            words.append("" if mine is None else f"**{mine:.2f}**" if best else f"{mine:.2f}")
        lines.append([cell.family, cell.setting, str(cell.seeds), *words])
    return markdown(["family", "setting", "seeds", "loss", "busiest load, training", "validation"], lines)


def draw(found: list[Cell], path: Path) -> None:
    """Draw loss against load, in training and in validation, with a line per family and a horizontal line for dense."""
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(WIDE, 4.4), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for panel, load in zip(panels, ("load_training", "load_validation"), strict=True):
            for number, family in enumerate(FAMILIES):
                mine = [cell for cell in found if cell.family == family]
                colour = METHODS[number % len(METHODS)]
                if mine and mine[0].load_training is None:
                    panel.axhline(mine[0].loss, color=INK, linewidth=0.8, label=family)
                elif mine:
                    mine.sort(key=lambda cell: getattr(cell, load))
                    ours = family.startswith("expert threshold")
                    x, y, errors = zip(*((getattr(cell, load), cell.loss, cell.error) for cell in mine), strict=True)
                    fill = {"markerfacecolor": colour if ours else "white", "markersize": 5, "elinewidth": 0.7}
                    panel.errorbar(x, y, errors, marker="o", color=colour, linewidth=1.0, label=family, **fill)
            panel.set(xscale="log", xlabel=f"load of the busiest expert / mean, {load.removeprefix('load_')}")
            ticks = [1, 1.25, 1.5, 2, 3, 4, 6, 8]
            panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            panel.minorticks_off()
        panels[0].set_ylabel("validation loss, nats per token")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, dpi=160, facecolor="white")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=2_000_000)
    options.add_argument("--seeds", type=int, nargs="*", default=[0])
    options.add_argument("--only", choices=FAMILIES, nargs="+", default=list(FAMILIES), metavar="FAMILY")
    asked = options.parse_args()
    if asked.show is not None:
        found = cells(read(asked.show))
        print(table(found))
        draw(found, asked.show.with_suffix(".png"))
        return
    for seed, family in itertools.product(asked.seeds, asked.only):
        for setting, given in FAMILIES[family].items():
            run = {"family": family, "setting": setting, "tokens": asked.tokens, "seed": seed}
            record_run(run, f"{SHARED} {given}", asked.data, asked.out, 4)


if __name__ == "__main__":
    run_script("frontier", main)

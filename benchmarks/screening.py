"""Measures what many small pieces of the trunk and of the optimizer are worth at once, each by all runs.

    python benchmarks/screening.py --out FOLDER [--rules expert_threshold,dense] [--steps 400] [--threads N]

Every run of `et train quickstart` leaves about half of the pieces out, by a design of Plackett and Burman (1946): any
two pieces are left out together in a quarter of the runs. So each piece's worth is the mean loss of half of the runs
less that of the other half, with a standard error of 2 / √runs of a run's, where one pair of runs (`ablations.py`) has
√2. It is an average over runs with and without the others: pieces that are large or replace one another belong in
`ablations.py`. The seed is one more column. The interval comes from the differences between the rules, so that a
piece that is worth more under one of them widens it. Worth at equal seconds is less by what the time that a piece takes
would be worth as further steps; runs with half of the steps tell what those are worth. Times are processor seconds of
steps with all pieces and without each, made in turn once all runs are there, best with nothing else running.

Finished runs are kept, and the same command continues; several commands may make runs of several rules in one folder.
Writes screening.json and screening.md into --out.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from ablations import FIRST_SEED, MARGIN, OPTIMIZER, TRUNK, train
from bare import origin
from common import compute_dtype, machine, positive, run

from expert_threshold.analysis.paired import student
from expert_threshold.cli.run_options import parse_run, resolve_run
from expert_threshold.config import RunConfig
from expert_threshold.model import GPT
from expert_threshold.optim import make_optimizers
from expert_threshold.train import device

ALONE = ("value embeddings", "smear", "key offset", "fourth iteration", "experts in turns")
"""Pieces measured one at a time: the large ones, and one that dense does not have."""
PIECES = {name: options for name, options in (TRUNK | OPTIMIZER).items() if name not in ALONE}
PART_OF = {"caution in it": "weight decay of matrices", "its fall": "weight decay of matrices"}
"""Pieces that do nothing where another is left out."""


def plackett_burman(columns: int) -> np.ndarray:
    """Return a design of at least so many columns, True where a piece is left out; in the last run none is.

    By Paley: p + 1 runs for p columns, where p is a prime of the form 4 n + 3, the least that suffices.
    """
    p = next(n for n in range(max(columns, 3), 2 * columns + 12) if n % 4 == 3 and all(n % d for d in range(2, n)))
    squares = {i * i % p for i in range(1, p)}
    design = np.array([[(j - i) % p in squares for j in range(p)] for i in range(p)] + [[False] * p])
    return design ^ (np.diag([True] * p + [False])[:, :p])


def effects(design: np.ndarray, names: list[str], values: list[float]) -> dict[str, float]:
    """Return what each piece's absence adds to the values, by least squares over the runs.

    design: (runs, columns), whose first columns are those of `names`; the last is the seed.
    """
    columns = {name: design[:, i] for i, name in enumerate(names)}
    columns |= {name: columns[name] & ~columns[PART_OF[name]] for name in names if PART_OF.get(name) in columns}
    matrix = np.stack([np.ones(len(design)), *columns.values(), design[:, -1]], 1).astype(float)
    solution = np.linalg.lstsq(matrix, np.array(values), rcond=None)[0]
    return dict(zip(names, solution[1:-1].tolist(), strict=True))


def configured(options: str) -> RunConfig:
    """Return the run of `et train quickstart` with these options. Raises ValueError if they contradict each other."""
    return resolve_run(parse_run("et train", "", [], ["quickstart", *options.split()]))


def stepper(options: str) -> Callable[[], float]:
    """Return a function that makes a step of the run and returns its processor seconds."""
    run = configured(options)
    model = GPT(run.model, compute_dtype("auto"))
    optimizers = make_optimizers(model.named_parameters(), run.optim, run.model.d_model)
    tokens = torch.randint(run.model.vocab_size, (run.train.batch_size, run.model.context + 1))
    made = 0

    def step() -> float:
        nonlocal made
        start = time.process_time()
        output = model(tokens[:, :-1], tokens[:, 1:])
        assert output.loss is not None
        output.loss.backward()
        optimizers.step(made, run.train.steps)
        model.update_rules(output.observations)
        optimizers.zero_grad()
        made += 1
        return time.process_time() - start

    return step


def speeds_without(rule: str, repeats: int) -> dict[str, float]:
    """Return the steps a second without each piece over those with all, the median over rounds of one step of each."""
    torch.manual_seed(0)
    whole = stepper(f"--rule {rule}")
    without = {name: stepper(f"--rule {rule} {options}") for name, options in PIECES.items()}
    ratios: dict[str, list[float]] = {name: [] for name in without}
    with device.gc_frozen():
        for repeat in range(2 + repeats):
            for name, step in without.items():
                seconds = whole() / step()
                if repeat >= 2:
                    ratios[name].append(seconds)
    return {name: median(found) for name, found in ratios.items()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rules", default="expert_threshold,dense")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--eval-tokens", type=positive, default=100_000)
    parser.add_argument("--threads", type=positive)
    parser.add_argument("--repeats", type=positive, default=15, help="steps of each kind that are timed")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error(f"argument --steps: {arguments.steps} must be at least 2")
    return arguments


def summarise(
    losses: dict[str, list[float]], halves: dict[str, float], speeds: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """Return the table. By rule, losses: of each run; halves: with half the steps; speeds: without each piece."""
    names = list(PIECES)
    design = plackett_burman(len(names) + 1)
    worth = {rule: effects(design, names, of_runs) for rule, of_runs in losses.items()}
    slope = {rule: (halves[rule] - of_runs[-1]) / math.log(2) for rule, of_runs in losses.items()}
    half = None
    if len(losses) == 2:
        first, second = worth.values()
        half = student(0.95, len(names)) * math.sqrt(fmean((first[name] - second[name]) ** 2 for name in names)) / 2
    rows = {
        name: {
            "worth": {rule: worth[rule][name] for rule in losses},
            "mean": fmean(worth[rule][name] for rule in losses),
            "speed_without": {rule: speeds[rule][name] for rule in losses},
            "at_equal_seconds": fmean(
                worth[rule][name] - slope[rule] * math.log(speeds[rule][name]) for rule in losses
            ),
        }
        for name in names
    }
    return {"runs": len(design), "half_interval": half, "losses_of_half": halves, "slope": slope, "pieces": rows}


def to_markdown(result: dict[str, Any]) -> str:
    here, half, rules = result["machine"], result["half_interval"], list(result["losses"])
    within = "" if half is None else f" ± {half:.3f}"
    lines = [
        f"{result['steps']} steps of quickstart, {result['runs']} runs of each rule in a Plackett-Burman design, "
        f"{result['dtype']}; {here['cpu']}, threads: {here['threads']}, torch {here['torch']}, {result['date']}, "
        f"commit {str(result['commit'])[:8]}",
        "",
        f"| piece | worth in nats, {' | '.join(rules)} | mean{within} | at equal seconds | "
        "steps/s without it over with it |",
        "| --- |" + " ---: |" * (len(rules) + 3),
    ]
    for name, row in sorted(result["pieces"].items(), key=lambda item: -item[1]["at_equal_seconds"]):
        each = " | ".join(f"{row['worth'][rule]:+.3f}" for rule in rules)
        speeds = ", ".join(f"{speed:.3f}" for speed in row["speed_without"].values())
        lines.append(f"| {name} | {each} | {row['mean']:+.3f} | {row['at_equal_seconds']:+.3f} | {speeds} |")
    return "\n".join([*lines, ""])


def main() -> None:
    arguments = parse()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    names, rules = list(PIECES), arguments.rules.split(",")
    design = plackett_burman(len(names) + 1)
    options = [" ".join(PIECES[name] for name, out in zip(names, row, strict=False) if out) for row in design]
    for rule in rules:  # none may be unknown, no run may contradict itself
        for text in options:
            configured(f"--rule {rule} {text}")
    losses: dict[str, list[float]] = {}
    halves = {}
    for rule in rules:
        losses[rule] = [
            train(arguments, rule, f"run {number:02d}", text, FIRST_SEED + int(row[-1]))[0]
            for number, (row, text) in enumerate(zip(design, options, strict=True))
        ]
        half = argparse.Namespace(**vars(arguments) | {"steps": arguments.steps // 2})
        halves[rule] = train(half, rule, "half of the steps", "", FIRST_SEED)[0]
    speeds = {rule: speeds_without(rule, arguments.repeats) for rule in rules}
    result = {
        "steps": arguments.steps,
        "dtype": str(compute_dtype("auto")).removeprefix("torch."),
        **origin(),
        "machine": machine(),
        "margin": MARGIN,
        "options": PIECES,
        "losses": losses,
        **summarise(losses, halves, speeds),
    }
    (arguments.out / "screening.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (arguments.out / "screening.md").write_text(to_markdown(result), encoding="utf-8")
    print((arguments.out / "screening.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    run(main, "interrupted; the same command continues")

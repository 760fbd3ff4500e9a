"""Runs of `et train quickstart` as records in FOLDER/records.jsonl, none trained twice, and measurements of runs."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from datetime import date
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

import expert_threshold
from expert_threshold.cli import main as et
from expert_threshold.cli.run_options import parse_run, resolve_run
from expert_threshold.compare.paired import student
from expert_threshold.data import Corpus, Loader, Tokenizer, Tokens, pack, windows
from expert_threshold.model import GPT
from expert_threshold.runs import RunFolder
from expert_threshold.train.device import machine

Record = dict[str, Any]
Batches = Iterable[tuple[Tensor, Tensor]]  # of tokens and targets, (rows, context)


def read(path: Path) -> list[Record]:
    """Return the records in a file, none if it does not exist."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def record_run(
    run: Record,
    options: str,
    data: Path,
    out: Path,
    checkpoints: int,
    measure: Callable[[RunFolder], Record] = lambda folder: {},
) -> None:
    """Train a run, or resume it if it was interrupted, and append its record, unless the folder `out` already has it.

    run: what identifies the run, with its tokens and seed. checkpoints: how many the run saves; only its last is kept.
    measure: returns further fields of the record from the run's folder. Exits if the run fails or is interrupted.
    """
    path = out / "records.jsonl"
    if any(run.items() <= each.items() for each in read(path)):
        return
    place = out / "runs" / "-".join(str(part).replace(", ", "_").replace(" ", "_") for part in run.values())
    start, busy, resumed = time.time(), time.process_time(), (place / "config.json").exists()
    given = ["quickstart", *f"{options} --tokens {run['tokens']} --seed {run['seed']}".split()]
    steps = resolve_run(parse_run("et train", "", [], given)).train.steps
    given += ["--eval-every", str(steps), "--checkpoint-every", str(max(1, steps // checkpoints))]
    new = [*given, "--data", str(data), "--out", str(place)]
    code = et(["train", *(["--resume", str(place)] if resumed else new)])
    folder = RunFolder.open(place)
    lines = folder.metrics.read()
    if code or not lines or lines[-1]["split"] != "validation":
        sys.exit(code or 130)
    last = lines.pop()
    settled = [line for line in lines if line["split"] == "train" and line["step"] - line["steps"] >= steps / 4]
    git = ["git", "-C", str(Path(expert_threshold.__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    made = run | {
        "loss": last["loss"],
        "load_training": worst_load(settled),
        "load_validation": worst_load([last]),
        "seconds": time.time() - start,
        "processor_seconds": time.process_time() - busy,
        "resumed": resumed,  # if so, seconds cover only the last part
        "corpus": folder.section("corpus")["hash"],
        "options": " ".join(given),
        "versions": folder.section("versions"),
        "machine": machine(torch.device("cpu")),
        "commit": subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip(),
        "date": date.today().isoformat(),
    }
    made |= measure(folder)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(made) + "\n")
    for checkpoint in sorted((place / "checkpoints").iterdir())[:-1]:
        shutil.rmtree(checkpoint)


def worst_load(lines: list[Record]) -> float | None:
    """Return the worst layer's load, averaged over lines, or None if the model has no experts."""
    loads = [max(layer["load_spread"] for layer in line["layers"].values()) for line in lines if line["layers"]]
    return fmean(loads) if loads else None


def batches_of(text: Tokens, context: int, rows: int, most: int) -> list[tuple[Tensor, Tensor]]:
    """Return the first `most` tokens of a text, as far as they fill rows, in batches of up to so many rows."""
    found = [(row.tokens, row.targets) for row in islice(windows(text, context), min(most, len(text)) // context)]
    parts = (found[start : start + rows] for start in range(0, len(found), rows))
    return [
        (torch.stack(tokens), torch.stack(targets)) for tokens, targets in (zip(*part, strict=True) for part in parts)
    ]


def drawn(source: Corpus, tokenizer: Tokenizer, context: int, most: int, seed: int) -> Batches:
    """Return batches of 64 random rows of a source's training text, with at least `most` tokens in total."""
    text = pack(source, tokenizer, "train") if source.parts is None else source.parts("train", tokenizer)
    return islice(Loader(text, 64, context, seed), math.ceil(most / (64 * context)))


@torch.no_grad()
def routed(model: GPT, batches: Batches, running: bool = False) -> tuple[Tensor, Tensor]:
    """Return the loss of every token, (tokens,), and its experts in every layer, (layers, tokens, experts).

    running: whether to update the rule's state after each batch, as in training.
    """
    nats, assignments, rule = [], [], model.config.rule
    for tokens, targets in batches:
        output = model(tokens, targets, record=True)
        nats.append(output.token_losses.double().flatten())
        assignments.append(torch.stack([routing.assignment.flatten(0, 1) for routing in output.routings]))
        for (_, moe), routing in zip(model.moe_layers(), output.routings, strict=True) if running and rule else ():
            pooled = rule.calibration_rule(rule.experts_per_token)
            moe.router.update(pooled.route(routing.scores, moe.router.state, training=True).observation)
    return torch.cat(nats), torch.cat(assignments, 1)


def busiest(assignment: Tensor) -> float:
    """Return the worst layer's load of the busiest expert over the mean."""
    loads = assignment.sum(1).double()
    return float((loads.amax(-1) / loads.mean(-1)).max())


def over_documents(change: Tensor, tokens: Tensor, bos: int) -> tuple[float, float]:
    """Return the mean change in the loss of tokens, (tokens,), and its standard error over documents."""
    document, mean = tokens.eq(bos).cumsum(0), change.mean()
    return float(mean), float(torch.bincount(document, change - mean).square().sum().sqrt()) / len(change)


def widening(freedom: int) -> float:
    """Return by what to multiply deviations in a bootstrap, so that 95 % intervals are as wide as by Student's t."""
    return student(0.95, freedom) / 1.96


def parser(about: str | None, *, show: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the options of a study: its data and folder, or instead of a folder what is to be shown."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--data", type=Path, default=Path("tokens"))
    what = made.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="FOLDER")
    if show:
        what.add_argument("--show", type=Path, metavar="PATH")
    return made


def run_script(name: str, main: Callable[[], object]) -> None:
    """Call a script's main function, and exit with one line and code 2 if it raises ValueError."""
    try:
        main()
    except ValueError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)


def print_each_run(name: str, about: str | None, measure: Callable[[Path, int], Record]) -> None:
    """Print what a script measures on --tokens tokens, a JSON line for each RUN on its command line."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    made.add_argument("--tokens", type=int, default=400_000)
    asked = made.parse_args()
    run_script(name, lambda: [print(json.dumps(measure(run, asked.tokens)), flush=True) for run in asked.runs])

"""Measures what a comparison can resolve: how much paired differences of two methods vary over seeds, and what helps.

    python benchmarks/evidence/power.py --data FOLDER/tokens --out FOLDER [--megatokens 1 2 4 8] [--variant NAME] …

The runs are `et train quickstart` with softmax expert threshold, and with softmax token choice and a loss of α = 0.01.
Both routers have the same number of scores, so with one seed both runs start with the same weights, whose hash is
recorded, and see the same tokens in the same order. A run is validated at its end, at five checkpoints in its last
tenth, and with the mean of their weights. FOLDER/records.jsonl holds one JSON line per finished run. If the command is
repeated, it skips these runs and resumes an interrupted one; --seeds 0 only prints the table. Loads are the busiest
expert's over the mean in the worst layer, in training after the first quarter and in causal validation. In the table,
scatter is the standard deviation over seeds of the difference, expert threshold minus token choice, ± its standard
error; seeds is the number of seeds needed for a 95 % interval of ± 0.01.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from datetime import date
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Any

import torch

import expert_threshold
from expert_threshold.cli import main as et
from expert_threshold.cli.run_options import parse_run, resolve_run
from expert_threshold.data import open_source, pack
from expert_threshold.evaluation import evaluate
from expert_threshold.model import GPT
from expert_threshold.runs import RunFolder, load_model
from expert_threshold.train.device import machine

FIRST, SECOND = "expert_threshold", "token_choice"
METHODS = {
    FIRST: "--rule expert_threshold --rule.gate softmax --rule.null-scores 16",
    SECOND: "--rule token_choice --rule.balance aux --rule.aux-strength 0.01 --rule.gate softmax --rule.null-scores 16",
    "dense": "--rule dense",
}
VARIANTS = {
    "usual": "",
    "to_zero": "--optim.min-lr-ratio 0",
    "half_batches": "--batch-size 4",
}  # ways to use the tokens
SHARED = "--threads 1 --eval-tokens 400000 --sample-every none --train.keep-checkpoints 5"
LOSSES = {
    "the end": lambda record: record["loss"],
    "five late validations": lambda record: fmean(record["late"].values()),
    "mean of their weights": lambda record: record["averaged"],
}

Record = dict[str, Any]
key = itemgetter("variant", "method", "tokens", "seed")


def train(out: Path, data: Path, given: list[str]) -> Record:
    """Train or resume a run, and return its record. Exits if the run fails or is interrupted."""
    config, start, busy = resolve_run(parse_run("et train", "", [], given)), time.time(), time.process_time()
    steps, resumed = config.train.steps, (out / "config.json").exists()
    given = [*given, "--eval-every", str(steps), "--checkpoint-every", str(max(1, steps // 40))]
    code = et(["train", "--resume", str(out)] if resumed else ["train", *given, "--data", str(data), "--out", str(out)])
    folder = RunFolder.open(out)
    *lines, last = folder.metrics.read()
    if code or last["split"] != "validation":
        sys.exit(code or 130)
    torch.manual_seed(config.train.seed)
    weights = b"".join(weight.detach().numpy().tobytes() for weight in GPT(config.model).parameters())
    return {
        "loss": last["loss"],
        **late_losses(folder),
        "load_training": worst_load(settled(lines, steps)),
        "load_validation": worst_load([last]),
        "seconds": time.time() - start,
        "processor_seconds": time.process_time() - busy,
        "resumed": resumed,  # if so, seconds cover only the last part
        "initial_weights": sha256(weights).hexdigest()[:16],
        **provenance(folder, given),
    }


def provenance(folder: RunFolder, given: list[str]) -> Record:
    """Return the provenance of a run: its text, options, versions, machine, commit and date."""
    git = ["git", "-C", str(Path(expert_threshold.__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    return {
        "corpus": folder.section("corpus")["hash"],
        "options": " ".join(given),
        "versions": folder.section("versions"),
        "machine": machine(torch.device("cpu")),
        "commit": subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip(),
        "date": date.today().isoformat(),
    }


def settled(lines: list[Record], steps: int) -> list[Record]:
    """Return the training lines after the first quarter of the steps."""
    return [line for line in lines if line["split"] == "train" and line["step"] - line["steps"] >= steps / 4]


def late_losses(folder: RunFolder) -> Record:
    """Return the losses of the last checkpoints, by step, and of a model with their mean weights and cutoffs."""
    tokenizer, data, train = folder.tokenizer(), folder.section("data")["source"], folder.section("train")
    most, text = train["eval_tokens"], pack(open_source(data), tokenizer, "validation")
    losses, means, saved = {}, {}, folder.checkpoints()
    for step in saved:
        model, _ = load_model(folder.path, step, compute_dtype=getattr(torch, train["dtype"]))
        losses[str(step)] = evaluate(model, text, tokenizer, max_tokens=most).loss
        for name, value in folder.load_checkpoint(step, parts=("model",)).tensors["model"].items():
            means[name] = means.get(name, 0) + value / len(saved) if value.is_floating_point() else value
    model.load_state_dict(means)
    return {"late": losses, "averaged": evaluate(model, text, tokenizer, max_tokens=most).loss}


def worst_load(lines: list[Record]) -> float | None:
    """Return the worst layer's load, averaged over lines, or None if the model has no experts."""
    loads = [max(layer["load_spread"] for layer in line["layers"].values()) for line in lines if line["layers"]]
    return fmean(loads) if loads else None


def table(records: list[Record]) -> str:
    """Return the table of paired differences. Raises ValueError if a pair differs in more than its method."""
    known, cells = {key(record): record for record in records}, defaultdict(list)
    for (variant, method, tokens, seed), first in known.items():
        second = known.get((variant, SECOND, tokens, seed))
        if method == FIRST and second is not None:
            if any(first[name] != second[name] for name in ("initial_weights", "corpus", "commit")):
                raise ValueError(f"{variant}, {tokens} tokens, seed {seed}: the pair's weights, text or commit differ")
            cells[tokens, variant].append((first, second))
    lines = ["| tokens | variant | loss at | pairs | mean difference | scatter | seeds | scatter of one method |"]
    lines.append("| ---: | --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for (tokens, variant), pairs in sorted(cells.items()):
        for name, loss in LOSSES.items() if len(pairs) > 2 else ():
            sides = [[loss(record) for record in side] for side in zip(*pairs, strict=True)]
            differences = [a - b for a, b in zip(*sides, strict=True)]
            scatter, alone = stdev(differences), fmean(map(variance, sides)) ** 0.5
            error, seeds = scatter / (2 * len(pairs) - 2) ** 0.5, math.ceil((1.96 * scatter / 0.01) ** 2)
            row = f"| {tokens / 1e6:g}M | {variant} | {name} | {len(pairs)} | {fmean(differences):+.4f} "
            lines.append(f"{row}| {scatter:.4f} ± {error:.4f} | {seeds} | {alone:.4f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("tokens"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--megatokens", type=float, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[FIRST, SECOND])
    parser.add_argument("--variant", choices=VARIANTS, default="usual")
    asked = parser.parse_args()
    path = asked.out / "records.jsonl"
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    for megatokens, seed, method in itertools.product(asked.megatokens, range(asked.seeds), asked.methods):
        run = {"variant": asked.variant, "method": method, "tokens": int(1e6 * megatokens), "seed": seed}
        if key(run) in map(key, records):
            continue
        out = asked.out / "runs" / "-".join(map(str, run.values()))
        options = f"{SHARED} {METHODS[method]} {VARIANTS[asked.variant]} --tokens {run['tokens']} --seed {seed}"
        records.append(run | train(out, asked.data, ["quickstart", *options.split()]))
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(records[-1]) + "\n")
        for checkpoint in sorted((out / "checkpoints").iterdir())[:-1]:
            shutil.rmtree(checkpoint)
    print(table(records))


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"power: {error}", file=sys.stderr)
        sys.exit(2)

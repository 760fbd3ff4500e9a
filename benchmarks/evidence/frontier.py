"""Measures loss against load: which way of balancing has the lowest loss at a given load of the busiest expert?

    python benchmarks/evidence/frontier.py --data FOLDER/tokens --out FOLDER [--seeds 0 1] [--only NAME …]

Runs are those of `et train quickstart` with --tokens, one for each setting of each family below, and are judged by
their loss and by the busiest expert's load over the mean in the worst layer: in training after the first quarter, and
in causal validation. The same command skips runs that are recorded, one JSON line each in FOLDER/records.jsonl, and
resumes an interrupted one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import time
from operator import itemgetter
from pathlib import Path
from typing import Any

from power import provenance, settled, worst_load

from expert_threshold.cli import main as et
from expert_threshold.cli.run_options import parse_run, resolve_run
from expert_threshold.runs import RunFolder

SOFTMAX = "--rule.gate softmax --rule.null-scores 16"
SHARED = "--threads 1 --eval-tokens 400000 --sample-every none --checkpoint-every 100"


def choices(rule: str, option: str, *values: object) -> dict[str, str]:
    """Return the options of each setting of a family: its rule's, with one value each of the option."""
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
    "expert threshold, mean": choices(
        f"expert_threshold {SOFTMAX} --rule.estimator mean", "capacity-slack", 0.1, 0.5, "none"
    ),
    "expert threshold, sigmoid": choices("expert_threshold", "capacity-slack", 0.1, 0.5, "none"),
    "expert choice": choices(f"expert_choice {SOFTMAX}", "pool", "sequence", 1024, "batch"),
}
"""The settings of each family by name, in the order of its line."""

Record = dict[str, Any]
key = itemgetter("family", "setting", "tokens", "seed")


def train(out: Path, data: Path, given: list[str]) -> Record:
    """Train a run, or what is left of it, and return its record. Ends the process if that fails or is interrupted."""
    start, busy, resumed = time.time(), time.process_time(), (out / "config.json").exists()
    steps = resolve_run(parse_run("et train", "", [], given)).train.steps
    given = [*given, "--eval-every", str(steps)]
    code = et(["train", "--resume", str(out)] if resumed else ["train", *given, "--data", str(data), "--out", str(out)])
    folder = RunFolder.open(out)
    *lines, last = folder.metrics.read()
    if code or last["split"] != "validation":
        sys.exit(code or 130)
    return {
        "loss": last["loss"],
        "load_training": worst_load(settled(lines, steps)),
        "load_validation": worst_load([last]),
        "seconds": time.time() - start,
        "processor_seconds": time.process_time() - busy,
        "resumed": resumed,  # seconds are then those of the last part
        **provenance(folder, given),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("tokens"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--only", choices=FAMILIES, nargs="+", default=list(FAMILIES), metavar="FAMILY")
    asked = parser.parse_args()
    path = asked.out / "records.jsonl"
    for seed, family in itertools.product(asked.seeds, asked.only):
        for setting, options in FAMILIES[family].items():
            run = {"family": family, "setting": setting, "tokens": asked.tokens, "seed": seed}
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            if key(run) in map(key, map(json.loads, lines)):
                continue
            out = asked.out / "runs" / "-".join(str(part).replace(", ", "_").replace(" ", "_") for part in run.values())
            given = ["quickstart", *f"{SHARED} {options} --tokens {asked.tokens} --seed {seed}".split()]
            record = run | train(out, asked.data, given)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            for checkpoint in sorted((out / "checkpoints").iterdir())[:-1]:
                shutil.rmtree(checkpoint)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"frontier: {error}", file=sys.stderr)
        sys.exit(2)

"""Measures what each piece of the trunk and of the optimizer is worth: the loss without it less the loss of the whole.

    python benchmarks/ablations.py --out FOLDER [--rules expert_threshold,dense] [--pieces trunk|optimizer|NAME,NAME]
        [--steps 250] [--seeds 2] [--threads N]

Runs are those of `et train quickstart`, paired by seed: the same tokens in the same order. Seeds count from 2000, since
comparisons count from 0 and sweeps from 1000. No piece's absence is tuned for. Seconds are those of training, so
nothing else should run where they matter; losses do not depend on it. Finished runs are kept, and the same command
continues. Writes ablations.json and ablations.md into --out.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from bare import origin
from common import call, compute_dtype, machine, positive, require_same, run

from expert_threshold.analysis.paired import paired
from expert_threshold.analysis.sentences import counted
from expert_threshold.runs import RunFolder

TRUNK = {
    "value embeddings": "--value-embeddings none",
    "residual scalars": "--no-residual-scalars",
    "skip scalars": "--no-skip-scalars",
    "smear": "--no-smear",
    "backout": "--no-backout",
    "sharper attention": "--qk-scale 1",
    "larger rotary base": "--rotary-base 10000",
    "key offset": "--key-offset none",
    "nanochat's initialisation": "--initialization paper",
}
OPTIMIZER = {
    "Polar Express": "--orthogonalizer newton_schulz",
    "fourth iteration": "--ns-steps 3",
    "experts in turns": "--expert-period 1",
    "equilibration": "--equilibrate none",
    "renormalisation": "--renormalize none",
    "variance reduction": "--normuon none",
    "weight decay of matrices": "--weight-decay 0",
    "caution in it": "--no-cautious-weight-decay",
    "its fall": "--weight-decay-schedule constant",
    "AdamW's weight decay": "--embed-weight-decay 0 --value-embed-weight-decay 0 --head-weight-decay 0 "
    "--residual-weight-decay 0",
    "rise of momentum": "--momentum-warmup-steps 0",
    "fall of momentum": "--momentum-end none",
    "warmup of learning rates": "--adamw-warmup-steps 0 --muon-warmup-steps 0",
    "constant rates before the cooldown": "--schedule linear",
}
"""Pieces, each with the options that take it away."""
GROUPS = {"trunk": TRUNK, "optimizer": OPTIMIZER, "all": TRUNK | OPTIMIZER}
WHOLE = "whole"
FIRST_SEED = 2000
MARGIN = 0.005  # nats below which a piece counts as worth nothing


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rules", default="expert_threshold,dense")
    parser.add_argument("--pieces", default="all", help="trunk, optimizer, all, or names separated by commas")
    parser.add_argument("--steps", type=positive, default=250)
    parser.add_argument("--seeds", type=positive, default=2)
    parser.add_argument("--eval-tokens", type=positive, default=100_000)
    parser.add_argument("--threads", type=positive)
    return parser.parse_args()


def chosen_pieces(text: str) -> dict[str, str]:
    """Return the pieces that the option names. Raises ValueError for one that is unknown."""
    if text in GROUPS:
        return GROUPS[text]
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in GROUPS["all"]:
            raise ValueError(
                f"--pieces {name!r} is unknown; use {', '.join(GROUPS)} or some of {', '.join(GROUPS['all'])}"
            )
    return {name: GROUPS["all"][name] for name in names}


def train(arguments: argparse.Namespace, rule: str, name: str, options: str, seed: int) -> tuple[float, float]:
    """Train a run, or what is left of it, and return its validation loss and its tokens a second.

    Raises ValueError if the run is there with other options.
    """
    out = arguments.out / "runs" / rule / name.replace(" ", "_") / f"seed_{seed}"
    every = max(1, arguments.steps // 5)
    command = ["quickstart", "--rule", rule, "--steps", arguments.steps, "--seed", seed, "--eval-every", every]
    command += ["--log-every", every, "--eval-tokens", arguments.eval_tokens, "--sample-every", "none"]
    command += ["--checkpoint-every", "none", *options.split()]
    command += [] if arguments.threads is None else ["--threads", arguments.threads]
    if not (out / "config.json").exists():
        call("train", *command, "--out", out)
    else:
        require_same(out, command)
        if not (out / "report.html").exists():
            call("train", "--resume", out)
    records = RunFolder.open(out).metrics.read()
    losses = [record["loss"] for record in records if record["split"] == "validation"]
    speeds = [record["tokens_per_second"] for record in records if "tokens_per_second" in record]
    return losses[-1], statistics.median(speeds)


def summarise(runs: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Return, for each piece, what the loss gains and the speed loses without it. runs: by piece, of each seed."""
    rows = {}
    for name, found in runs.items():
        pairs = list(zip(found, runs[WHOLE], strict=True))
        difference = paired([without[0] - whole[0] for without, whole in pairs], MARGIN)
        speed = statistics.median(without[1] / whole[1] for without, whole in pairs)
        loss = statistics.mean(without[0] for without, _ in pairs)
        rows[name] = {"loss": loss, "worth": difference._asdict(), "speed_without": speed, "seeds": len(pairs)}
    return rows


def to_markdown(result: dict[str, Any]) -> str:
    here = result["machine"]
    lines = [
        f"{result['steps']} steps of quickstart, {counted(result['seeds'], 'seed')}, {result['dtype']}; {here['cpu']}, "
        f"{counted(here['threads'], 'thread')}, torch {here['torch']}, {result['date']}, commit "
        f"{str(result['commit'])[:8]}",
        "",
    ]
    for rule, rows in result["rules"].items():
        lines += [
            f"| {rule}, without | validation loss | worth in nats, 95 % interval | tokens/s without it over with it |",
            "| --- | ---: | ---: | ---: |",
        ]
        for name, row in rows.items():
            worth = row["worth"]
            interval = "" if worth["low"] is None else f", {worth['low']:+.3f} to {worth['high']:+.3f}"
            cells = ("–", "–") if name == WHOLE else (f"{worth['mean']:+.3f}{interval}", f"{row['speed_without']:.2f}")
            lines.append(f"| {'nothing' if name == WHOLE else name} | {row['loss']:.3f} | {cells[0]} | {cells[1]} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    arguments = parse()
    pieces = {WHOLE: "", **chosen_pieces(arguments.pieces)}
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    rules: dict[str, dict[str, list[tuple[float, float]]]] = {rule: {} for rule in arguments.rules.split(",")}
    for number in range(arguments.seeds):
        for rule, runs in rules.items():
            for name, options in pieces.items():
                runs.setdefault(name, []).append(train(arguments, rule, name, options, FIRST_SEED + number))
        result = {
            "steps": arguments.steps,
            "seeds": number + 1,
            "dtype": str(compute_dtype("auto")).removeprefix("torch."),
            **origin(),
            "machine": machine(),
            "options": pieces,
            "rules": {rule: summarise(runs) for rule, runs in rules.items()},
        }
        (arguments.out / "ablations.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        (arguments.out / "ablations.md").write_text(to_markdown(result), encoding="utf-8")
    print((arguments.out / "ablations.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    run(main, "interrupted; the same command continues")

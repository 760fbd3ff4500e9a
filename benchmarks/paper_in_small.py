"""Table 1 of the paper, its batch-size sweep and its ablations at a scale that this machine allows.

    python benchmarks/paper_in_small.py --data FOLDER --out FOLDER [--preset quickstart] [--tokens 2000000] [--seeds 3]
        [--recipes A,B,…] [-- OPTIONS OF et train]
    python benchmarks/paper_in_small.py --redraw --out FOLDER

Every recipe is trained with the same seeds, so on the same tokens in the same order under one seed, and evaluated
causally on the whole validation split (`--eval-tokens` bounds it); expert choice by the pools of training as well. What
is finished is not done again, and a run that was interrupted goes on: the same command continues. Writes into --out
results.json and results.md ("paper | ours") with the machine, the date, the commit and the tokens, whichever way they
fall, and the figures that et analyze makes of the runs. Differences are of runs under the same seed, with the 95 %
interval of their mean by Student's t. --redraw makes differences and results.md anew from the results.json there.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from bare import origin
from common import call, machine, over_seeds, positive, run

from expert_threshold.analysis.judgement import MARGIN
from expert_threshold.analysis.paired import paired
from expert_threshold.data import open_source, pack
from expert_threshold.recipes import RECIPES
from expert_threshold.runs import RunFolder

FIGURES = "loss_by_method,token_multiple,batch_size_scaling,train_against_validation,shared_expert,fanout_norm"
D12 = [name for name, recipe in RECIPES.items() if recipe.preset == "d12" and name != "release"]
POOLS = ("expert_choice_2k", "expert_choice_8k", "expert_choice_64k", "expert_choice_512k")
# What the paper says of two runs: their names, and the second's CE minus the first's.
DIFFERENCES = {
    "TC − ET": ("expert_threshold", "token_choice", 0.049),
    "dense − ET": ("expert_threshold", "dense", 0.158),
    "without − with shared expert, EC 512k": ("expert_choice_512k", "expert_choice_512k_no_shared", 0.019),
    "without − with shared expert, ET no warmup": (
        "expert_threshold_no_warmup",
        "expert_threshold_no_warmup_no_shared",
        0.018,
    ),
    "fanout norm − none, ET": ("expert_threshold", "expert_threshold_fanout_norm", 0.04),
    "no warmup − warmup, ET": ("expert_threshold", "expert_threshold_no_warmup", 0.0),
    "TC with loss − TC": ("token_choice", "token_choice_aux", -0.001),
    "TC loss-free − TC": ("token_choice", "token_choice_loss_free", 0.005),
    "EC 2k − ET": ("expert_threshold", "expert_choice_2k", 0.066),
    "EC 8k − ET": ("expert_threshold", "expert_choice_8k", 0.001),
    "EC 512k − ET": ("expert_threshold", "expert_choice_512k", -0.001),
    "EC 2k − EC 512k": ("expert_choice_512k", "expert_choice_2k", 0.067),
    "EC 8k − EC 512k": ("expert_choice_512k", "expert_choice_8k", 0.002),
}


def train(arguments: argparse.Namespace, recipe: str, seed: int) -> Path:
    """Train and evaluate, or what is left of it."""
    out: Path = arguments.out / recipe / f"seed_{seed}"
    if (out / "evaluation.json").exists():
        return out
    if (out / "config.json").exists():
        call("train", "--resume", out)
    else:
        options = ["--data", arguments.data, "--tokens", arguments.tokens, "--seed", seed, *arguments.options]
        call("train", arguments.preset, "--recipe", recipe, *options, "--out", out)
    bound = [] if arguments.eval_tokens is None else ["--eval-tokens", arguments.eval_tokens]
    call("evaluate", out, "--bundle", "none", *bound)
    return out


def read(out: Path) -> dict[str, Any]:
    """Losses of one run: at the end, by training's pools, of training's last tenth, and the curve over tokens."""
    folder = RunFolder.open(out)
    validation = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))["validation"]
    records = folder.metrics.read()
    steps = folder.config["train"]["steps"]
    seen = [
        record["cross_entropy"] for record in records if record["split"] == "train" and record["step"] > 0.9 * steps
    ]
    per_step = records_tokens(folder)
    return {
        "loss": validation["loss"],
        "bits_per_byte": validation["bits_per_byte"],
        "loss_by_pools": validation.get("training_pools", {}).get("loss"),
        "train_loss": statistics.mean(seen),
        "curve": [[r["step"] * per_step, r["loss"]] for r in records if r["split"] == "validation"],
    }


def records_tokens(folder: RunFolder) -> int:
    """The tokens of one optimizer step."""
    options = folder.config["train"]
    tokens: int = options["batch_size"] * options["accumulation"] * folder.config["model"]["context"]
    return tokens


def multiple(runs: dict[str, list[dict[str, Any]]], better: str, worse: str) -> list[float | None]:
    """For each seed: the tokens `worse` was trained on over those after which `better` reached its last loss."""
    found: list[float | None] = []
    for ours, theirs in zip(runs.get(better, []), runs.get(worse, []), strict=False):
        tokens, goal = theirs["curve"][-1]
        found.append(next((tokens / reached(a, b, goal) for a, b in pairwise(ours["curve"]) if b[1] <= goal), None))
    return found


def reached(before: list[float], after: list[float], goal: float) -> float:
    """The tokens at which a straight line between two points of a curve is at the goal."""
    share = 1.0 if before[1] <= after[1] else (before[1] - goal) / (before[1] - after[1])
    return before[0] + min(max(share, 0.0), 1.0) * (after[0] - before[0])


def with_interval(values: list[float]) -> dict[str, float | None]:
    """Mean and spread of differences, and half of the mean's 95 % interval; None for a single one."""
    mean, low, _, _ = paired(values, MARGIN)
    return {"mean": mean, "spread": over_seeds(values)["spread"], "interval": None if low is None else mean - low}


def differences(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """A difference of two recipes: the paper's, and that of runs here under the same seeds."""
    last = {name: [run["loss"] for run in found] for name, found in runs.items()}
    return {
        what: {"paper": paper, "ours": with_interval([b - a for a, b in zip(last[first], last[second], strict=True)])}
        for what, (first, second, paper) in DIFFERENCES.items()
        if first in last and second in last
    }


def summarise(arguments: argparse.Namespace, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    config = RunFolder.open(arguments.out / next(iter(runs)) / "seed_0")
    corpus, tokenizer = open_source(arguments.data), config.tokenizer()
    per_epoch = len(pack(corpus, tokenizer, "train"))
    last = {name: [run["loss"] for run in found] for name, found in runs.items()}
    gaps = {name: over_seeds([run["loss"] - run["train_loss"] for run in runs[name]]) for name in runs}
    return {
        "preset": arguments.preset,
        "options": arguments.options,
        "data": corpus.name,
        "corpus_hash": corpus.hash,
        "tokens_of_a_run": config.config["train"]["steps"] * records_tokens(config),
        "epochs": config.config["train"]["steps"] * records_tokens(config) / per_epoch,
        "seeds": arguments.seeds,
        **origin(),
        "machine": machine(),
        "losses": {name: over_seeds(values) for name, values in last.items()},
        "differences": differences(runs),
        "token_multiple": {"paper": 1.6, "ours": multiple(runs, "expert_threshold", "token_choice")},
        "train_evaluation_gap": gaps,
        "runs": runs,
    }


def to_markdown(result: dict[str, Any]) -> str:
    """The table "paper | ours"."""

    def show(value: dict[str, float] | None) -> str:
        return "–" if value is None else f"{value['mean']:.3f} ± {value['spread']:.3f}"

    lines = [
        f"{result['preset']} on {result['data']}: {result['tokens_of_a_run']:,} tokens a run, {result['epochs']:.2f} "
        f"epochs, {result['seeds']} seeds; {result['machine']['cpu']}, torch {result['machine']['torch']}, "
        f"{result['date']}, commit {result['commit'][:8]}",
        "",
        "| | CE, paper | CE, ours | ours − training's last tenth |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, loss in result["losses"].items():
        paper = RECIPES[name].reported.cross_entropy
        gap = show(result["train_evaluation_gap"][name])
        lines.append(f"| {name} | {'–' if paper is None else f'{paper:.3f}'} | {show(loss)} | {gap} |")
    lines += ["", "Differences under the same seed; ± is the spread over seeds.", ""]
    lines += ["| difference | paper | ours | 95 % interval of the mean |", "| --- | ---: | ---: | ---: |"]
    for what, found in result["differences"].items():
        mean, half = found["ours"]["mean"], found["ours"]["interval"]
        interval = "–" if half is None else f"{mean - half:+.3f} to {mean + half:+.3f}"
        lines.append(f"| {what} | {found['paper']:.3f} | {show(found['ours'])} | {interval} |")
    ours = ", ".join("never" if m is None else f"{m:.2f}" for m in result["token_multiple"]["ours"])
    lines += ["", f"Tokens of TC over those of ET at TC's last loss: {ours or '–'}; the paper has 1.6.", ""]
    return "\n".join(lines)


def write(out: Path, result: dict[str, Any]) -> None:
    (out / "results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (out / "results.md").write_text(to_markdown(result), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="the text; needed unless --redraw")
    parser.add_argument("--redraw", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", default="quickstart")
    parser.add_argument("--tokens", type=positive, default=2_000_000)
    parser.add_argument("--eval-tokens", type=positive)
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--recipes", default=",".join(D12))
    parser.add_argument("options", nargs="*", help="more options of et train, after --")
    arguments = parser.parse_args()
    if arguments.redraw:
        result = json.loads((arguments.out / "results.json").read_text(encoding="utf-8"))
        write(arguments.out, result | {"differences": differences(result["runs"])})
        return
    if arguments.data is None:
        parser.error("--data is missing: the text to train on")
    names = arguments.recipes.split(",")
    folders = {(name, seed): train(arguments, name, seed) for seed in range(arguments.seeds) for name in names}
    runs = {name: [read(folders[name, seed]) for seed in range(arguments.seeds)] for name in names}
    result = summarise(arguments, runs)
    write(arguments.out, result)
    call("analyze", arguments.out, "--figures", FIGURES, "--out", arguments.out / "figures")
    print((arguments.out / "results.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    run(main, "interrupted; the same command continues")

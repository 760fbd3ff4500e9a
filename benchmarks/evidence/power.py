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

import itertools
from collections import defaultdict
from contextlib import AbstractContextManager
from hashlib import sha256
from operator import itemgetter
from statistics import fmean, stdev, variance
from typing import Any
from unittest.mock import patch

import frontier
import torch
from ladder import RULES
from study import Record, parser, read, record_run, run_script

from expert_threshold.analysis.results import markdown
from expert_threshold.compare.paired import student
from expert_threshold.config import run_config
from expert_threshold.data import Loader, Tokens, open_source, pack
from expert_threshold.evaluation import evaluate
from expert_threshold.model import GPT
from expert_threshold.runs import RunFolder, load_model
from expert_threshold.train import prepare

FIRST, SECOND = "expert_threshold", "token_choice"
METHODS = {FIRST: RULES["expert threshold"], SECOND: RULES["token choice"], "dense": RULES["dense"]}
VARIANTS = {
    "usual": "",
    "to_zero": "--optim.min-lr-ratio 0",
    "half_batches": "--batch-size 4",
    "one_start": "",  # every seed begins with seed 0's weights
    "one_order": "",  # every seed reads the text in seed 0's order
}  # ways to use the tokens
SHARED = f"{frontier.SHARED} --train.keep-checkpoints 5"
LOSSES = {
    "the end": lambda record: record["loss"],
    "five late validations": lambda record: fmean(record["late"].values()),
    "mean of their weights": lambda record: record["averaged"],
}

key = itemgetter("variant", "method", "tokens", "seed")


def half_seeded(variant: str) -> AbstractContextManager[object]:
    """Return a context in which runs of any seed have the weights or the order of seed 0, if the variant says so."""

    def start(*given: Any, **named: Any) -> GPT:
        torch.manual_seed(0)
        return GPT(*given, **named)

    def order(text: Tokens, rows: int, context: int, seed: int, *given: Any, **named: Any) -> Loader:
        return Loader(text, rows, context, 0, *given, **named)

    changes = {"one_start": {"GPT": start}, "one_order": {"Loader": order}}
    return patch.multiple(prepare, **changes.get(variant, {"GPT": GPT}))


def initial_weights(folder: RunFolder) -> str:
    """Return the start of the hash of the weights with which a run begins."""
    config = run_config(folder.config)
    torch.manual_seed(config.train.seed)
    weights = b"".join(weight.detach().numpy().tobytes() for weight in prepare.GPT(config.model).parameters())
    return sha256(weights).hexdigest()[:16]


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


def measure(folder: RunFolder) -> Record:
    return {"initial_weights": initial_weights(folder), **late_losses(folder)}


def table(records: list[Record]) -> str:
    """Return the table of paired differences. Raises ValueError if a pair differs in more than its method."""
    known, cells = {key(record): record for record in records}, defaultdict(list)
    for (variant, method, tokens, seed), first in known.items():
        second = known.get((variant, SECOND, tokens, seed))
        if method == FIRST and second is not None:
            if any(first[name] != second[name] for name in ("initial_weights", "corpus", "commit")):
                raise ValueError(f"{variant}, {tokens} tokens, seed {seed}: the pair's weights, text or commit differ")
            cells[tokens, variant].append((first, second))
    lines = []
    for (tokens, variant), pairs in sorted(cells.items()):
        for name, loss in LOSSES.items() if len(pairs) > 2 else ():
            sides = [[loss(record) for record in side] for side in zip(*pairs, strict=True)]
            differences = [a - b for a, b in zip(*sides, strict=True)]
            scatter, alone = stdev(differences), fmean(map(variance, sides)) ** 0.5
            error = scatter / (2 * len(pairs) - 2) ** 0.5
            seeds = next(n for n in itertools.count(2) if student(0.95, n - 1) * scatter <= 0.01 * n**0.5)
            row = [f"{tokens / 1e6:g}M", variant, name, f"{len(pairs)}", f"{fmean(differences):+.4f}"]
            lines.append([*row, f"{scatter:.4f} ± {error:.4f}", f"{seeds}", f"{alone:.4f}"])
    head = ["tokens", "variant", "loss at", "pairs", "mean difference", "scatter", "seeds", "scatter of one method"]
    return markdown(head, lines)


def main() -> None:
    given = parser(__doc__, show=False)
    given.add_argument("--megatokens", type=float, nargs="+", default=[1, 2, 4, 8])
    given.add_argument("--seeds", type=int, default=8)
    given.add_argument("--methods", nargs="+", choices=METHODS, default=[FIRST, SECOND])
    given.add_argument("--variant", choices=VARIANTS, default="usual")
    asked = given.parse_args()
    for megatokens, seed, method in itertools.product(asked.megatokens, range(asked.seeds), asked.methods):
        run = {"variant": asked.variant, "method": method, "tokens": int(1e6 * megatokens), "seed": seed}
        options = f"{SHARED} {METHODS[method]} {VARIANTS[asked.variant]}"
        with half_seeded(asked.variant):
            record_run(run, options, asked.data, asked.out, 40, measure)
    print(table(read(asked.out / "records.jsonl")))


if __name__ == "__main__":
    run_script("power", main)

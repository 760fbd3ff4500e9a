"""Measures the compute dial, calibration and upcycling on small runs, and trains those that are missing.

    python benchmarks/dial.py --runs FOLDER --out FOLDER [--seed 0] [--parts dial,pools,upcycle] [--names et,batch]

dial: loss against active compute of one checkpoint, at rates that it was not trained for; beside it, at whole rates,
the same checkpoint when every token takes its best-scored experts instead. pools: the loss of expert choice by the
pools of its training, by the cutoffs it kept, and by calibrated ones, for pools of several sizes. upcycle: a dense run
trained on for half as long again, as it is and upcycled, and one that had experts from the beginning. Everything causal
but the pools; losses over the same validation tokens, in nats per token.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import machine
from torch import Tensor

from expert_threshold.analysis.plain import plain
from expert_threshold.cli import main as et
from expert_threshold.cli.rates import draw
from expert_threshold.data import Loader, open_source, pack
from expert_threshold.evaluation import evaluate, measure_rates
from expert_threshold.model import GPT, parameter_counts
from expert_threshold.model.calibrate import calibrate
from expert_threshold.routing import ExpertChoice, Routing, TokenChoice
from expert_threshold.runs import RunFolder, load_model

SIZE = ["tiny", "--layers", "4", "--vocab-size", "1024", "--eval-every", "400", "--threads", "1"]
STEPS = 800
METHODS = {
    "et": ["--rule", "expert_threshold"],
    "batch": ["--rule", "expert_choice", "--pool", "batch"],
    "dense": ["--rule", "dense"],
    "sequence": ["--rule", "expert_choice", "--pool", "sequence"],
    "512": ["--rule", "expert_choice", "--pool", "512"],
}
RATES = [None, 0, 0.125, 0.25, 0.5, 1, 2, 4, 16]
EVAL_TOKENS, CALIBRATION_TOKENS = 65_536, 262_144
BATCH = 16  # sequences of 128 tokens, as in training


def run_of(runs: Path, name: str, seed: int, options: list[str], size: list[str] = SIZE, steps: int = STEPS) -> Path:
    """The run's folder, trained unless it is there."""
    path = runs / f"{name}-{seed}"
    if not path.exists():
        code = et(["train", *size, "--steps", str(steps), "--seed", str(seed), *options, "--out", str(path)])
        assert code == 0, path
    return path


class Text:
    """The tokens of the embedded corpus as a run sees them."""

    def __init__(self, run: Path) -> None:
        corpus = open_source("embedded")
        self.tokenizer = RunFolder.open(run).tokenizer()
        self.held_out = pack(corpus, self.tokenizer, "validation")
        self.train = pack(corpus, self.tokenizer, "train")

    def loss(self, model: GPT, **how: Any) -> dict[str, float]:
        how = {"batch_size": BATCH, "max_tokens": EVAL_TOKENS, **how}
        found = evaluate(model, self.held_out, self.tokenizer, **how)
        fanouts = [float(observation.fanout_mean) for observation in found.observations]
        return {"loss": found.loss, "fanout": sum(fanouts) / len(fanouts) if fanouts else 0.0, "tokens": found.tokens}


class BestExperts(NamedTuple):
    """Every token takes its best-scored experts, whatever the cutoffs."""

    rule: TokenChoice

    def route(self, scores: Tensor, state: object, *, training: bool, group: object = None) -> Routing:
        return self.rule.route(scores, self.rule.init(), training=training)


def by_best_experts(model: GPT, text: Text, count: int) -> dict[str, float]:
    with ruled(model, lambda rule: BestExperts(TokenChoice(rule.num_experts, count))):
        return text.loss(model)


def by_batch_pools(model: GPT, text: Text, sequences: int) -> dict[str, float]:
    with ruled(model, lambda rule: ExpertChoice(rule.num_experts, rule.experts_per_token, pool="batch")):
        return text.loss(model, batch_size=sequences, training_pools=True)


@contextmanager
def ruled(model: GPT, changed: Callable[[Any], Any]) -> Iterator[None]:
    """The model with another rule in every router."""
    routers = [moe.router for _, moe in model.moe_layers()]
    own = [router.rule for router in routers]
    for router in routers:
        router.rule = changed(router.rule)
    try:
        yield
    finally:
        for router, rule in zip(routers, own, strict=True):
            router.rule = rule


def measure_dial(runs: Path, seed: int, names: Sequence[str] = ("et", "batch")) -> dict[str, Any]:
    results = {}
    for name in names:
        run = run_of(runs, name, seed, METHODS[name])
        text, (model, tokenizer) = Text(run), load_model(run)
        points = measure_rates(model, text.held_out, tokenizer, RATES, max_tokens=EVAL_TOKENS)
        best = {str(count): by_best_experts(model, text, count) for count in (1, 2, 4)}
        results[name] = {"run": name, "points": plain([p._asdict() for p in points]), "best_experts": plain(best)}
        print(name, [(point.rate, round(point.fanout, 3), round(point.loss, 4)) for point in points], best, flush=True)
    return results


def measure_pools(runs: Path, seed: int, names: Sequence[str] = ("sequence", "512", "batch", "et")) -> dict[str, Any]:
    results = {}
    for name in names:
        run = run_of(runs, name, seed, METHODS[name])
        text, (model, _) = Text(run), load_model(run)
        found = {"by training": text.loss(model, training_pools=True), "trained cutoffs": text.loss(model)}
        model.set_rate(1)
        found["sketch at rate 1"] = text.loss(model)
        model.set_rate(None)
        batches = CALIBRATION_TOKENS // (BATCH * model.config.context)
        calibrate(model, islice(Loader(text.train, BATCH, model.config.context, seed=0), batches))
        found["calibrated"] = text.loss(model)
        if isinstance(model.config.rule, ExpertChoice):
            for sequences in (4, 16, 64):
                pool = f"pools of {sequences * model.config.context:,} tokens"
                found[pool] = by_batch_pools(model, text, sequences)
        results[name] = plain(found)
        print(name, json.dumps(results[name]), flush=True)
    return results


def measure_upcycling(runs: Path, seed: int, steps: int = 400) -> dict[str, Any]:
    dense = run_of(runs, "dense", seed, METHODS["dense"])
    start = runs / f"upcycled-{seed}"
    if not start.exists():
        assert et(["upcycle", str(dense), "--to", str(start)]) == 0
    size = ["tiny", "--eval-every", "100", "--threads", "1"]
    warmup = ["--warmup-steps", str(steps // 5)]
    experts = run_of(runs, "et", seed, METHODS["et"])
    further = {
        "experts from the beginning, trained on": run_of(
            runs, "et-on", seed, ["--init-from", str(experts)], size, steps
        ),
        "dense, trained on": run_of(runs, "dense-on", seed, ["--init-from", str(dense)], size, steps),
        "upcycled, trained on": run_of(runs, "upcycled-on", seed, ["--init-from", str(start), *warmup], size, steps),
    }
    text, results = Text(dense), {}
    for name, run in {"dense": dense, "upcycled": start, "experts from the beginning": experts, **further}.items():
        model, _ = load_model(run)
        counts = parameter_counts(model.config)
        results[name] = plain(text.loss(model)) | {"params_total": counts["total"], "params_active": counts["active"]}
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if name in further else []
        results[name]["validation"] = [[line["step"], line["loss"]] for line in lines if line["split"] == "validation"]
        print(name, json.dumps(results[name]), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", default="dial,pools,upcycle")
    parser.add_argument("--names", help="of the runs to measure, as et,batch; they are added to what there is")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Callable[..., dict[str, Any]]] = {
        "dial": measure_dial,
        "pools": measure_pools,
        "upcycle": measure_upcycling,
    }
    for part in args.parts.split(","):
        path = args.out / f"{part}-{args.seed}.json"
        found = json.loads(path.read_text())["results"] if args.names and path.exists() else {}
        named = [args.names.split(",")] if args.names and part != "upcycle" else []
        found |= parts[part](args.runs, args.seed, *named)
        record = {"seed": args.seed, "steps": STEPS, "size": SIZE, **machine(), "results": found}
        path.write_text(json.dumps(record, indent=1) + "\n")
        if part == "dial":
            names = {"et": "expert threshold", "batch": "expert choice, pools of 2,048 tokens"}
            draw({names[name]: result for name, result in found.items()}, args.out / f"dial-{args.seed}.png")


if __name__ == "__main__":
    main()

"""A whole optimizer step of a preset: its model FLOPs over time, against a 2048³ product's rate in the same run.

    python benchmarks/step.py [--preset quickstart] [--rule expert_threshold] [--expert-period N] [--compile off on]

Model FLOPs are those of `flops_per_token`: 6 per active weight that multiplies and attention's products. Muon's
products, routing and everything else count as time, not as work. Batches are of the embedded corpus; loads are those of
a model that has trained `--warm-steps` steps, past the warmup of expert threshold, which is set to end before. Where
layers take turns at moving their experts, what is timed is a whole round of steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from typing import Any

import torch
from common import compute_dtype, machine, options, positive, time_interleaved

from expert_threshold.config import resolve
from expert_threshold.data import Loader, Tokenizer, open_source, pack
from expert_threshold.model import GPT, flops_per_token, parameter_counts
from expert_threshold.optim import make_optimizers
from expert_threshold.train.compilation import compiled


def measure(rule: str, compiling: bool, given: argparse.Namespace) -> dict[str, float | int | str]:
    torch.manual_seed(0)
    dtype, repeats = compute_dtype(given.dtype), given.repeats
    options: dict[str, Any] = {"rule.name": rule}
    if rule == "expert_threshold":
        options["rule.warmup_steps"] = given.warm_steps // 2
    if given.expert_period is not None:
        options["optim.expert_period"] = given.expert_period
    run = resolve(given.preset, options)
    turns = run.optim.expert_period
    corpus = open_source("embedded")
    tokenizer = Tokenizer.train(corpus.documents("train"), run.model.vocab_size)
    loader = Loader(pack(corpus, tokenizer, "validation"), run.train.batch_size, run.model.context, seed=0)
    model = GPT(run.model, dtype)
    forward = compiled(model) if compiling else model
    optimizers = make_optimizers(model.named_parameters(), run.optim, run.model.d_model)
    parts: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}
    steps_done = 0

    def step() -> None:
        nonlocal steps_done
        batch = next(loader)
        times = [time.perf_counter()]
        output = forward(batch.tokens, batch.targets)
        times.append(time.perf_counter())
        assert output.loss is not None
        output.loss.backward()
        times.append(time.perf_counter())
        optimizers.step(steps_done, run.train.steps)
        model.update_rules(output.observations)
        optimizers.zero_grad()
        times.append(time.perf_counter())
        steps_done += 1
        for part, start, end in zip(parts, times, times[1:], strict=False):
            parts[part].append(end - start)

    a, b = (torch.randn(2048, 2048).to(dtype) for _ in range(2))
    for _ in range(given.warm_steps):
        step()
    times = time_interleaved({"steps": lambda: [step() for _ in range(turns)], "product": lambda: a @ b}, repeats, 1)
    step_seconds, product_seconds = statistics.median(times["steps"]) / turns, statistics.median(times["product"])
    tokens = run.train.batch_size * run.model.context
    rate, peak = flops_per_token(run.model) * tokens / step_seconds, 2 * 2048**3 / product_seconds
    counts = parameter_counts(run.model)
    return {
        "preset": given.preset,
        "rule": rule,
        "dtype": str(dtype).removeprefix("torch."),
        "compiled": compiling,
        "utilisation": round(rate / peak, 4),
        "step_ms": round(step_seconds * 1e3, 2),
        **{f"{part}_ms": round(median_of_rounds(v[-repeats * turns :], turns) * 1e3, 2) for part, v in parts.items()},
        "expert_period": turns,
        "tokens_per_step": tokens,
        "tokens_per_second": round(tokens / step_seconds),
        "gflops": round(rate / 1e9, 1),
        "product_gflops": round(peak / 1e9, 1),
        "params_total": counts["total"],
        "params_active": counts["active"],
        "repeats": repeats,
        **machine(),
    }


def median_of_rounds(seconds: list[float], turns: int) -> float:
    """Return the median over rounds of `turns` steps of their mean time."""
    return statistics.median(statistics.fmean(seconds[i : i + turns]) for i in range(0, len(seconds), turns))


def main() -> None:
    parser = options(__doc__, repeats=15)
    parser.add_argument("--preset", default="quickstart")
    parser.add_argument("--rule", nargs="+", default=["expert_threshold"])
    parser.add_argument("--expert-period", type=positive, help="the preset's unless given")
    parser.add_argument("--compile", nargs="+", choices=["off", "on"], default=["off"], help="one line for each")
    parser.add_argument("--warm-steps", type=int, default=20)
    args = parser.parse_args()
    if args.warm_steps + (args.repeats + 1) * (args.expert_period or 1) > 1000:
        parser.error("--warm-steps and rounds of --expert-period come to more than 1,000 steps; ask for fewer")
    torch.set_num_threads(args.threads)
    for rule, compiling in itertools.product(args.rule, args.compile):
        print(json.dumps(measure(rule, compiling == "on", args)), flush=True)


if __name__ == "__main__":
    main()

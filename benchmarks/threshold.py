"""Measures the time that expert threshold adds to a step over one whose assignments are given.

    python benchmarks/threshold.py [--preset quickstart] [--device cuda] [--json]

`step` is an optimizer step; `given_step` is the same with assignments and observations recorded before, and no update.
`share` is the median of (step − given_step) / step, pair by pair. The parts are timed by themselves in the same run, on
recorded scores of all layers: `route` is all that the rule does in a forward, of which `select` finds the cuts,
`sketch` sketches the scores and `observe` sums up; `update` moves the cutoffs. `parts_share` is route and update over
the step. Loads are those of a model that has trained `--warm-steps` steps, past its warmup.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Iterator
from unittest import mock

import torch
from bare import origin
from common import compute_dtype, machine, positive, time_interleaved

from expert_threshold.config import resolve
from expert_threshold.data import Loader, Tokenizer, open_source, pack
from expert_threshold.model import GPT
from expert_threshold.optim import make_optimizers
from expert_threshold.routing import ExpertThreshold, Routing, bounds, kth_largest
from expert_threshold.routing.observation import observe
from expert_threshold.routing.sketch import sketch


def measure(preset: str, dtype: torch.dtype, repeats: int, warm_steps: int, device: torch.device) -> dict[str, object]:
    torch.manual_seed(0)
    run = resolve(preset, "expert_threshold", rule_options={"warmup_steps": warm_steps // 2})
    corpus = open_source("embedded")
    tokenizer = Tokenizer.train(corpus.documents("train"), run.model.vocab_size)
    loader = Loader(pack(corpus, tokenizer, "validation"), run.train.batch_size, run.model.context, seed=0)
    with device:
        model = GPT(run.model, dtype)
    optimizers = make_optimizers(model.named_parameters(), run.optim, run.model.d_model)

    def step(batch_tokens: torch.Tensor, targets: torch.Tensor, number: int, update: bool = True) -> None:
        output = model(batch_tokens, targets)
        output.loss.backward()
        optimizers.step(number, run.train.steps)
        if update:
            model.update_rules(output.observations)
        optimizers.zero_grad()

    for number in range(warm_steps):
        batch = next(loader)
        step(batch.tokens.to(device), batch.targets.to(device), number)
    # One batch from here on, so that both kinds of step have the same work.
    batch = next(loader)
    tokens, targets = batch.tokens.to(device), batch.targets.to(device)
    with torch.no_grad():
        routings = model(tokens, targets, record=True).routings
    rule = run.model.rule
    assert isinstance(rule, ExpertThreshold)
    assert routings is not None
    bystander = copy.deepcopy(model)  # whose cutoffs may move
    routers = [moe.router for _, moe in bystander.moe_layers()]
    scores = [routing.scores.detach() for routing in routings]
    flat = [score.flatten(0, 1) for score in scores]
    ks = bounds(tokens.numel(), rule.experts_per_token, rule.num_experts, rule.capacity_slack)

    def given_step() -> None:
        given = iter(routings)
        with mock.patch.object(ExpertThreshold, "route", lambda _, scores, *__, **___: next_with(scores, given)):
            step(tokens, targets, warm_steps, update=False)

    calls = {
        "step": lambda: step(tokens, targets, warm_steps),
        "given_step": given_step,
        "route": lambda: [rule.route(s, r.state, training=True) for s, r in zip(scores, routers, strict=True)],
        "select": lambda: [kth_largest(s[None], ks) for s in flat],
        "sketch": lambda: [sketch(s) for s in flat],
        "observe": lambda: [observe(r.scores, r.assignment, target=ks[0]) for r in routings],
        "update": lambda: bystander.update_rules(tuple(routing.observation for routing in routings)),
    }
    times = time_interleaved(calls, repeats, on=device)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    pairs = list(zip(times["step"], times["given_step"], strict=True))
    return {
        "benchmark": "threshold",
        **origin(),
        "preset": preset,
        "dtype": str(dtype).removeprefix("torch."),
        "tokens_per_step": tokens.numel(),
        "layers": len(routings),
        "share": round(statistics.median((a - b) / a for a, b in pairs), 4),
        "parts_share": round((medians["route"] + medians["update"]) / medians["step"], 4),
        **{f"{name}_ms": round(1e3 * seconds, 3) for name, seconds in medians.items()},
        "repeats": repeats,
        **machine(device),
    }


def next_with(scores: torch.Tensor, given: Iterator[Routing]) -> Routing:
    """The next given routing with these scores, whose gates still get gradients."""
    return next(given)._replace(scores=scores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="quickstart")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--repeats", type=positive, default=15)
    parser.add_argument("--warm-steps", type=int, default=20)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="one flat JSON object")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    row = measure(args.preset, compute_dtype(args.dtype), args.repeats, args.warm_steps, args.device)
    if args.json:
        print(json.dumps(row), flush=True)
        return
    print(f"{row['preset']} {row['dtype']}: {row['share']:.1%} of a step of {row['step_ms']} ms, and by its parts")
    print(f"{row['parts_share']:.1%}: " + ", ".join(f"{name} {row[f'{name}_ms']}" for name in PARTS) + " ms")


PARTS = ("route", "select", "sketch", "observe", "update")


if __name__ == "__main__":
    main()

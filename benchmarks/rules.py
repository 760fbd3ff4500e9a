"""Measures each rule's own time per optimizer step: routing, its backward, and the update of its state.

    python benchmarks/rules.py [--rules all] [--experts 16,64,256] [--tokens 8192] [--device cuda] [--json]

Scores are random and the same for all rules, so neither router nor experts run. `route` is a training forward; `step`
adds the backward through gates and loss, and the update. Times are medians of calls in turn, in milliseconds for one
layer. Names are those of `et compare --rules`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bare import origin
from common import machine, positive, time_interleaved
from torch import Tensor

from expert_threshold.recipes import methods
from expert_threshold.routing import DENSE, RULES, Rule


def rule_of(name: str, experts: int, experts_per_token: int) -> Rule:
    method = methods()[name]
    options = {"num_experts": experts, "experts_per_token": experts_per_token, **method.options}
    return RULES[method.rule](**options)


def make_scores(rule: Rule, batch: int, tokens: int, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(batch, tokens // batch, rule.num_scores, generator=generator)
    return scores.to(device).requires_grad_()


def route(rule: Rule, state: Any, scores: Tensor) -> Any:
    return rule.route(scores, state, training=True)


def step(rule: Rule, state: Any, scores: Tensor) -> Any:
    """Route, go backward as if experts had returned ones, and return the state after the update."""
    routing = route(rule, state, scores)
    total = (routing.gates * routing.assignment).sum()
    for more in (routing.loss, routing.passthrough):
        total = total if more is None else total + more.sum()
    torch.autograd.grad(total, scores)
    return rule.update(state, routing.observation)


def measure(
    names: list[str], experts: int, experts_per_token: int, batch: int, tokens: int, repeats: int, device: torch.device
) -> dict[str, dict[str, float]]:
    """Return milliseconds of `route` and `step` by rule."""
    calls: dict[str, Callable[[], object]] = {}
    for name in names:
        rule = rule_of(name, experts, experts_per_token)
        state = type(rule.init())(*(value.to(device) for value in rule.init()))
        for seed in range(3):
            state = step(rule, state, make_scores(rule, batch, tokens, device, seed))
        scores = make_scores(rule, batch, tokens, device)
        calls[f"{name} route"] = partial(route, rule, state, scores)
        calls[f"{name} step"] = partial(step, rule, state, scores)
    times = time_interleaved(calls, repeats, on=device)
    return {
        name: {part: 1e3 * statistics.median(times[f"{name} {part}"]) for part in ("route", "step")} for name in names
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", default="all", help="all, or names as A,B")
    parser.add_argument("--experts", default="16,64,256")
    parser.add_argument("--experts-per-token", type=int, default=1)
    parser.add_argument("--tokens", type=positive, default=8192)
    parser.add_argument("--batch", type=positive, default=16, help="sequences that the tokens are in")
    parser.add_argument("--repeats", type=positive, default=20)
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    known = [name for name in methods() if name != DENSE]
    names = known if given.rules == "all" else given.rules.split(",")
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"--rules {unknown[0]}: unknown; there are {', '.join(known)}")
    if given.tokens % given.batch:
        parser.error(f"--tokens {given.tokens}: must be a multiple of --batch {given.batch}")
    torch.set_num_threads(given.threads)
    sizes = {
        int(experts): measure(
            names, int(experts), given.experts_per_token, given.batch, given.tokens, given.repeats, given.device
        )
        for experts in given.experts.split(",")
    }
    if given.json:
        shape = {"tokens": given.tokens, "batch": given.batch, "experts_per_token": given.experts_per_token}
        print(json.dumps({**origin(), **machine(given.device), **shape, "milliseconds": sizes}, indent=1))
        return
    print(f"{given.tokens:,} tokens, milliseconds of one layer's step (route alone)")
    print("rule".ljust(40), *(f"{experts} experts".rjust(18) for experts in sizes))
    for name in names:
        cells = [f"{times[name]['step']:.2f} ({times[name]['route']:.2f})" for times in sizes.values()]
        print(name.ljust(40), *(cell.rjust(18) for cell in cells))


if __name__ == "__main__":
    main()

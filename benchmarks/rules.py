"""Measures each rule's own time per optimizer step: routing, its backward, and the update of its state.

    python benchmarks/rules.py [--rules all] [--experts 16,64,256] [--tokens 8192] [--threads 1]

Scores are random, so neither router nor experts run. `route` is a training forward; `step` adds the backward through
gates and loss, and the update (`gpu/parts.py`). Times are medians of calls in turn, in milliseconds for one
layer. Names are those of `et compare --rules`. Prints a flat JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from bare import origin
from common import machine, options, positive, time_interleaved
from gpu.parts import rule_calls
from gpu.setting import Setting

from expert_threshold.recipes import methods
from expert_threshold.routing import DENSE, RULES


def measure(names: list[str], experts: int, given: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of "NAME route" and "NAME step" for each rule."""
    calls: dict[str, Callable[[], object]] = {}
    setting = Setting(Path(), dry=False, cuda=False, data="")
    for name in names:
        method = methods()[name]
        sizes = {"num_experts": experts, "experts_per_token": given.experts_per_token, **method.options}
        route, step = rule_calls(RULES[method.rule](**sizes), given.batch, given.tokens // given.batch, setting)
        calls |= {f"{name} route": route, f"{name} step": step}
    return time_interleaved(calls, given.repeats)


def main() -> None:
    parser = options(__doc__, repeats=20, threads=torch.get_num_threads(), dtype=False)
    parser.add_argument("--rules", default="all", help="all, or names as A,B")
    parser.add_argument("--experts", default="16,64,256")
    parser.add_argument("--experts-per-token", type=int, default=1)
    parser.add_argument("--tokens", type=positive, default=8192)
    parser.add_argument("--batch", type=positive, default=16, help="sequences that the tokens are in")
    given = parser.parse_args()
    known = [name for name in methods() if name != DENSE]
    names = known if given.rules == "all" else given.rules.split(",")
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"--rules {unknown[0]}: unknown; there are {', '.join(known)}")
    if given.tokens % given.batch:
        parser.error(f"--tokens {given.tokens}: must be a multiple of --batch {given.batch}")
    torch.set_num_threads(given.threads)
    asked = {"tokens": given.tokens, "batch": given.batch, "experts_per_token": given.experts_per_token}
    for experts in map(int, given.experts.split(",")):
        times = measure(names, experts, given)
        for name in names:
            found = {f"{part}_ms": 1e3 * statistics.median(times[f"{name} {part}"]) for part in ("route", "step")}
            print(json.dumps({"rule": name, "experts": experts, **found, **asked, **machine(), **origin()}))


if __name__ == "__main__":
    main()

"""`et plan`: estimates what a run costs, without allocating any weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..config import RunConfig
from ..model.memory import backend
from ..plan import ONE_GPU, Machine, costs, duration, memory, share_out
from ..train.checks import require_pools_fit, require_split
from ..train.device import kernels_off, pick_dtype
from ..train.log import clock, say
from .options import Option, field_options
from .run_options import parse_run, resolve_run, start_of
from .tables import table

OPTIONS = [
    Option("json", bool, False, "Print one JSON object instead of tables."),
    *field_options(Machine, vars(ONE_GPU)),
]
DESCRIPTION = (
    "Estimate what a run costs: parameters, tokens, FLOPs, memory, time and money.\n\n"
    "Memory is the peak on one GPU, without the overhead of the allocator and the GPU's libraries. Each GPU holds all "
    "weights with replicate, a share of everything with shard, and a share of the experts with expert_parallel."
)


def run(arguments: Sequence[str]) -> None:
    """Print the plan of the run that the arguments describe."""
    given = parse_run("et plan", DESCRIPTION, OPTIONS, arguments)
    machine = Machine(**{name: given[name] for name in vars(ONE_GPU) if name in given})
    costs = start_of(given) | plan(resolve_run(given), machine)
    if given.get("json"):
        print(json.dumps(costs))
    else:
        for each in tables(costs):
            Console().print(each)
        for note in filter(None, (costs["assumed"], costs["kernels_off"])):
            say(Console(), note)


def plan(config: RunConfig, machine: Machine) -> dict[str, Any]:
    """Return all costs of the run on these GPUs, or on the CPU. Raises ValueError if its batch or pools do not fit."""
    require_split(config.model, config.train, machine.gpus)
    local = share_out(config, machine)
    require_pools_fit(config.model, replace(config.train, batch_size=local.pooled))
    cpu = torch.device("cpu")
    on_cpu, of_cpu = config.train.device == "cpu", pick_dtype(config.train.dtype, cpu)
    here = on_cpu or (config.train.device == "auto" and not torch.cuda.is_available())
    dtype = of_cpu if on_cpu or config.train.dtype == "float32" else torch.bfloat16
    return {
        **costs(config, machine),
        **vars(machine),
        "micro_batch": local.batch_size,
        "accumulation": local.accumulation,
        "dispatch": backend(config.model, local.batch_size * config.model.context, dtype, gpu=not on_cpu),
        "memory": memory(config, machine, dtype, gpu=not on_cpu),
        **duration(config, machine),
        "kernels_off": kernels_off(cpu, of_cpu) if here else None,
    }


def tables(costs: dict[str, Any]) -> list[Table]:
    """Return three tables: one of the run, one of its memory in each layout, and one of its time and money."""

    def lines(*names: str) -> list[tuple[str, ...]]:
        return [(name, _show(costs[name])) for name in names]

    start = ("preset", "recipe", "config", "rule", "dispatch", "params_total", "params_active")
    run = lines(*(name for name in start if costs.get(name) is not None))
    run += [(f"  {part}", _show(count)) for part, count in costs["parameters"].items()]
    run += lines("flops_per_token", "steps", "tokens_per_step", "tokens", "pool", "effective_pool")
    run += [("flops_total", f"{costs['flops_total']:.3e}")]
    layouts = costs["memory"]
    memory = [(part, *(f"{parts[part] / 2**30:.2f}" for parts in layouts.values())) for part in layouts["replicate"]]
    time = lines("gpus", "micro_batch", "accumulation", "utilisation", "peak_tflops", "price_per_gpu_hour")
    time += [
        ("tokens_per_second", f"{costs['tokens_per_second']:,.0f}"),
        ("duration", clock(3600 * costs["hours"])),
        ("gpu_hours", f"{costs['gpu_hours']:,.1f}"),
        ("cost", f"{costs['cost']:,.2f}"),
    ]
    heads = layouts if len(layouts) > 1 else [""]
    return [table(["run", ""], run), table(["GiB on a GPU", *heads], memory), table(["time", ""], time)]


def _show(value: object) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else escape(str(value))

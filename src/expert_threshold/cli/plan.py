"""`et plan`: estimates what a run costs, without allocating any weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ..config import RunConfig
from ..model.memory import backend
from ..option import Count, NonNegative, Positive, Share
from ..plan import ONE_GPU, Machine, costs, duration, memory, share_out
from ..train.checks import require_pools_fit, require_split
from ..train.device import kernels_off, pick_dtype
from ..train.log import clock, say
from .options import Option
from .run_options import parse_run, resolve_run, start_of

OPTIONS = [
    Option("json", bool, False, "Print one JSON object instead of tables."),
    Option("gpus", Count, ONE_GPU.gpus, "Number of GPUs that share the batch."),
    Option("micro_batch", Count | None, None, "Sequences per micro-batch. Defaults to a GPU's share of --batch-size."),
    Option("utilisation", Share, ONE_GPU.utilisation, "Model FLOPs utilisation (MFU), as a share of the peak."),
    Option("peak_tflops", Positive, ONE_GPU.peak_tflops, "Peak TFLOPS of one GPU. Defaults to the peak of an H100."),
    Option("price_per_gpu_hour", NonNegative, ONE_GPU.price_per_gpu_hour, "Price per GPU-hour, in any currency."),
]
DESCRIPTION = (
    "Estimate what a run costs: parameters, tokens, FLOPs, memory, time and money.\n\n"
    "Memory is the peak on one GPU, without the overhead of the allocator and the GPU's libraries. Each GPU holds all "
    "weights with replicate, a share of everything with shard, and a share of the experts with expert_parallel."
)


def run(arguments: Sequence[str]) -> None:
    """Print the plan of the run that the arguments describe."""
    given = parse_run("et plan", DESCRIPTION, OPTIONS, arguments)
    machine = Machine(**{name: given[name] for name in Machine._fields if name in given})
    costs = start_of(given) | plan(resolve_run(given), machine)
    if given.get("json"):
        print(json.dumps(costs))
    else:
        for table in tables(costs):
            Console().print(table)
        for note in filter(None, (costs["assumed"], costs["kernels_off"])):
            say(Console(), note)


def plan(config: RunConfig, machine: Machine) -> dict[str, Any]:
    """Return all costs of the run on these GPUs, or on the CPU. Raises ValueError if its batch or pools do not fit."""
    require_split(config.model, config.train, machine.gpus)
    local = share_out(config, machine)
    require_pools_fit(config.model, replace(config.train, batch_size=local.pooled))
    on_cpu = config.train.device == "cpu"
    here = on_cpu or (config.train.device == "auto" and not torch.cuda.is_available())
    cpu = torch.device("cpu")
    on_this_cpu = pick_dtype(config.train.dtype, cpu)
    off = kernels_off(cpu, on_this_cpu) if here else None
    dtype = on_this_cpu if on_cpu or config.train.dtype == "float32" else torch.bfloat16
    return {
        **costs(config, machine),
        **machine._asdict(),
        "micro_batch": local.batch_size,
        "accumulation": local.accumulation,
        "dispatch": backend(config.model, local.batch_size * config.model.context, dtype, gpu=not on_cpu),
        "memory": memory(config, machine, dtype, gpu=not on_cpu),
        **duration(config, machine),
        "kernels_off": off,
    }


def tables(costs: dict[str, Any]) -> list[Table]:
    """Return three tables: one of the run, one of its memory in each layout, and one of its time and money."""
    run = Table("run", "", box=box.SIMPLE)
    for name in ("preset", "recipe", "config", "rule", "dispatch", "params_total", "params_active"):
        if costs.get(name) is not None:
            run.add_row(name, _show(costs[name]))
    for part, count in costs["parameters"].items():
        run.add_row(f"  {part}", _show(count))
    for name in ("flops_per_token", "steps", "tokens_per_step", "tokens", "pool", "effective_pool"):
        run.add_row(name, _show(costs[name]))
    run.add_row("flops_total", f"{costs['flops_total']:.3e}")
    by_layout = costs["memory"]
    there = Table("GiB on a GPU", *(by_layout if len(by_layout) > 1 else [""]), box=box.SIMPLE)
    for part in next(iter(by_layout.values())):
        there.add_row(part, *(f"{parts[part] / 2**30:.2f}" for parts in by_layout.values()))
    time = Table("time", "", box=box.SIMPLE)
    for name in ("gpus", "micro_batch", "accumulation", "utilisation", "peak_tflops", "price_per_gpu_hour"):
        time.add_row(name, _show(costs[name]))
    time.add_row("tokens_per_second", f"{costs['tokens_per_second']:,.0f}")
    time.add_row("duration", clock(3600 * costs["hours"]))
    time.add_row("gpu_hours", f"{costs['gpu_hours']:,.1f}")
    time.add_row("cost", f"{costs['cost']:,.2f}")
    for table in (run, there, time):
        for column in table.columns[1:]:
            column.justify = "right"
    return [run, there, time]


def _show(value: object) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)

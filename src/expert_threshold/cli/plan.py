"""`et plan`: what a run would cost, without making a weight."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ..config import RunConfig
from ..model import flops_per_token, parameter_counts
from ..routing import rule_name
from .options import Option
from .run_options import parse_run, resolve_run, start_of

JSON = Option("json", bool, False, "Print one JSON object instead of a table.")


def run(arguments: Sequence[str]) -> None:
    """Print the plan of the run that the arguments mean."""
    given = parse_run("et plan", "Tell what a run would cost: parameters, tokens and FLOPs.", [JSON], arguments)
    costs = start_of(given) | plan(resolve_run(given))
    if given.get("json"):
        print(json.dumps(costs))
    else:
        Console().print(_table(costs))


def plan(config: RunConfig) -> dict[str, Any]:
    """Parameters in all, for one token and by part; tokens; model FLOPs of forward and backward."""
    parameters = parameter_counts(config.model)
    per_token = flops_per_token(config.model)
    tokens_per_step = config.train.batch_size * config.train.accumulation * config.model.context
    tokens = config.train.steps * tokens_per_step
    return {
        "rule": rule_name(config.model.rule),
        "params_total": parameters.pop("total"),
        "params_active": parameters.pop("active"),
        "parameters": parameters,
        "flops_per_token": per_token,
        "steps": config.train.steps,
        "tokens_per_step": tokens_per_step,
        "tokens": tokens,
        "flops_total": per_token * tokens,
    }


def _table(costs: dict[str, Any]) -> Table:
    table = Table("", "", show_header=False)
    table.columns[1].justify = "right"
    for name, value in costs.items():
        if name == "parameters":
            for part, count in value.items():
                table.add_row(f"  {part}", f"{count:,}")
        else:
            table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    return table

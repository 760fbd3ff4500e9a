"""`et upcycle`: initializes a Mixture-of-Experts run from a dense one."""

from __future__ import annotations

import operator
import shlex
from collections.abc import Sequence
from typing import Literal

import torch

from ..config import DEFAULT_RULE, scaled_rule
from ..files import corrupted_file_error, require_free
from ..install import et
from ..model import GPTConfig, parameter_counts
from ..model.upcycle import upcycle, upcycled_config
from ..option import NonNegativeInt
from ..routing import RULES, option_names
from ..runs import RunFolder, load_model
from ..runs.folder import derive
from .options import STEP, Option, parse_all

DESCRIPTION = (
    "Initialize a Mixture-of-Experts run from a dense run. The feed-forward layer becomes the shared expert. Routed "
    "experts start with copies of its input weights and zero output weights, so the model's outputs do not change."
)


def _options() -> list[Option]:
    return [
        Option("run", str, None, "The folder of the dense run. It is not changed.", positional=True, required=True),
        Option("to", str, None, "The run folder to create, for et train --init-from.", required=True),
        Option("rule", Literal[tuple(RULES)], DEFAULT_RULE, "Routing rule, which turns scores into an assignment."),
        Option("num_experts", int, 16, "Routed experts per layer."),
        Option("experts_per_token", float, 1.0, "Mean number of routed experts per token."),
        Option("d_expert", int | None, None, "Hidden width of an expert. Defaults to the dense run's d_expert."),
        Option("dense_layers", int, 1, "Number of initial layers that stay dense."),
        Option("seed", NonNegativeInt, 0, "Seed for the routers, and for the hidden units that each expert copies."),
        STEP,
    ]


def run(arguments: Sequence[str]) -> None:
    """Write the new run folder."""
    options = parse_all("et upcycle", DESCRIPTION, _options(), arguments)
    source, to = RunFolder.open(options["run"]), options["to"]
    require_free(to)
    with source.named():
        rule_before = GPTConfig.from_dict(source.config).rule
    if rule_before is not None:
        raise ValueError(f"{source.path} already has experts; use a run that was trained with --rule dense")
    known = option_names(options["rule"])
    own = {name: options[name] for name in ("num_experts", "experts_per_token") if name in known}
    step = source.load_checkpoint(options["step"], parts=()).step
    with corrupted_file_error(source.path / "config.json", "restore it from a backup, or train again"):
        steps = operator.index(source.config.get("train", {}).get("steps", max(step, 1)))
    rule = scaled_rule(options["rule"], steps, **own)  # decay and warmup for a run as long as this one
    assert rule is not None
    dense, _ = load_model(source.path, step)
    config = upcycled_config(dense.config, rule, d_expert=options["d_expert"], dense_layers=options["dense_layers"])
    model = upcycle(dense, config, torch.Generator().manual_seed(options["seed"]))
    derive(source, to, step, model.state_dict(), model=config.to_dict())
    before, after = (parameter_counts(each) for each in (dense.config, config))
    print(f"{to}: {after['total']:,} parameters, {after['active']:,} active; the dense run had {before['total']:,}")
    print(f"next: {et()} train --init-from {shlex.quote(str(to))} --out NEW")

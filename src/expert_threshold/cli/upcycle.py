"""`et upcycle`: a dense run as the start of a Mixture-of-Experts one."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Literal

import torch

from ..config import DEFAULT_RULE, scaled_rule
from ..install import et
from ..model import parameter_counts
from ..model.upcycle import upcycle, upcycled_config
from ..routing import RULES, option_names
from ..runs import RunFolder, load_model
from ..runs.derive import derive, require_free
from .options import STEP, Command, Option, parse_all

DESCRIPTION = (
    "Make a dense run the start of a Mixture-of-Experts one: the feed-forward becomes the shared expert, routed experts"
    " begin with copies of its input weights and with output weights of zero, so that the model computes what it did."
)


def _options() -> list[Option]:
    return [
        Option("run", str, None, "The folder of the dense run; it stays as it is.", positional=True, required=True),
        Option("to", str, None, "The run folder to make, to begin from with et train --init-from.", required=True),
        Option("rule", Literal[tuple(RULES)], DEFAULT_RULE, "How scores become an assignment."),
        Option("num_experts", int, 16, "Routed experts in a layer."),
        Option("experts_per_token", float, 1.0, "Routed experts of one token, on average."),
        Option("d_expert", int | None, None, "Hidden width of each expert; none is the run's, half a feed-forward."),
        Option("dense_layers", int, 1, "How many of the first layers stay without experts."),
        Option("seed", int, 0, "Draws routers, and which hidden units each expert begins with."),
        STEP,
    ]


def run(arguments: Sequence[str]) -> None:
    """Write the new run folder."""
    command = Command("et upcycle", DESCRIPTION, {"upcycle": _options()})
    options = parse_all(command, arguments)
    source, to = RunFolder.open(options["run"]), options["to"]
    require_free(to)
    if source.section("model")["rule"]["name"] != "dense":
        raise ValueError(f"{source.path} has experts already; name a run that was trained with --rule dense")
    if options["seed"] < 0:
        raise ValueError(f"--seed {options['seed']}: must be at least 0")
    known = option_names(options["rule"])
    own = {name: options[name] for name in ("num_experts", "experts_per_token") if name in known}
    step = source.load_checkpoint(options["step"], parts=()).step
    steps = source.config.get("train", {}).get("steps", max(step, 1))  # decay and warmup for a run as long as this one
    rule = scaled_rule(options["rule"], steps, **own)
    assert rule is not None
    dense, _ = load_model(source.path, step)
    config = upcycled_config(dense.config, rule, d_expert=options["d_expert"], dense_layers=options["dense_layers"])
    model = upcycle(dense, config, torch.Generator().manual_seed(options["seed"]))
    derive(source, to, step, model.state_dict(), model=config.to_dict())
    before, after = (parameter_counts(each) for each in (dense.config, config))
    print(f"{to}: {after['total']:,} parameters, {after['active']:,} active; it had {before['total']:,}")
    print(f"next: {et()} train --init-from {shlex.quote(str(to))} --out NEW")

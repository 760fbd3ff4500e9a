"""The contract every rule keeps, and the table of rules by name."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor

from .expert_choice import ExpertChoice
from .expert_threshold import ExpertThreshold
from .observation import Observation, Routing
from .pools import as_ratio
from .token_choice import TokenChoice


@runtime_checkable
class Rule(Protocol):
    """A frozen config with three pure methods: how scores become an assignment.

    With training=False a rule is causal: what a token gets depends on nothing after it.
    """

    @property
    def num_experts(self) -> int: ...

    @property
    def experts_per_token(self) -> float: ...

    def init(self) -> Any:
        """The state before the first step, a NamedTuple of tensors."""

    def route(
        self, scores: Tensor, state: Any, *, training: bool, group: dist.ProcessGroup | None = None
    ) -> Routing:
        """Assign scores (batch, time, experts) and say what was seen; changes nothing.

        group: the ranks over which a global pool is formed, or a global load counted. Raises ValueError if training
        finds a pool that does not divide the batch, or is so small that k = 0.
        """

    def update(self, state: Any, observation: Observation) -> Any:
        """The state after one optimizer step that saw `observation`, summed over micro-batches and ranks."""


RULES: dict[str, type[Rule]] = {
    "token_choice": TokenChoice,
    "expert_choice": ExpertChoice,
    "expert_threshold": ExpertThreshold,
}


def chooses_on_rank(rule: Rule) -> bool:
    """Whether what the rule chooses or loses in training depends on one rank's whole micro-batch, and on no other's."""
    if isinstance(rule, TokenChoice):
        return rule.balance == "aux"
    return isinstance(rule, ExpertChoice | ExpertThreshold) and rule.pool not in ("sequence", "global")


def most_pairs(rule: Rule, tokens: int, *, training: bool, ranks: int = 1) -> int | None:
    """As many pairs of a token and an expert as the rule assigns at most, of one rank's tokens, in pools of any
    size; None where nothing bounds them.

    ranks: those of the group that a global pool is formed over; it bounds their loads together, not those of one.
    """
    if isinstance(rule, TokenChoice):
        return tokens * rule.experts_per_token
    if not training or not isinstance(rule, ExpertChoice | ExpertThreshold) or (ranks > 1 and rule.pool == "global"):
        return None
    slack = rule.capacity_slack if isinstance(rule, ExpertThreshold) else 0
    if slack is None:
        return None
    (each, per), (extra, unit) = as_ratio(rule.experts_per_token), as_ratio(slack)
    return min(tokens * each * (unit + extra) // (per * unit), tokens * rule.num_experts)


def rule_name(rule: Rule | None) -> str:
    """The rule's name in the table; None is 'dense', a model without routed experts."""
    if rule is None:
        return "dense"
    return next(name for name, kind in RULES.items() if type(rule) is kind)


def rule_to_dict(rule: Rule | None) -> dict[str, Any]:
    """The rule as a JSON object: its name and every option."""
    return {"name": rule_name(rule)} | ({} if rule is None else asdict(rule))  # type: ignore[call-overload]


def rule_from_dict(record: dict[str, Any]) -> Rule | None:
    """The rule of `{"name": …, option: value, …}`. Raises ValueError on an unknown name or option."""
    if not isinstance(record, dict):
        raise ValueError(f'rule={record!r} must be an object such as {{"name": "expert_threshold"}}')
    options = dict(record)
    name = options.pop("name", None)
    if name not in ("dense", *RULES):
        raise ValueError(f"rule={name!r} is unknown; use one of dense, {', '.join(RULES)}")
    known = [] if name == "dense" else [f.name for f in fields(RULES[name])]  # type: ignore[arg-type]
    for option in options:
        if option not in known:
            raise ValueError(f"option {option!r} is unknown to rule {name}; it has {', '.join(known) or 'no options'}")
    return None if name == "dense" else RULES[name](**options)

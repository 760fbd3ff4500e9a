"""Replays the routing of generated text in training. Without it, rounding would change the routing of some tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..routing import Observation, Routing, Rule, rule_to_dict
from ..routing.gates import Gated
from .router import Router


class Capture(NamedTuple):
    """The routing of a sequence, as returned by `generate.capture`.

    tokens: (time,) int64. scores: (layers, time, experts) float32. assignment, gates: of the same shape; gates are 0
    outside the assignment. version: `routing_version` of the model.
    """

    tokens: Tensor
    scores: Tensor
    assignment: Tensor
    gates: Tensor
    version: str


def routers(model: nn.Module) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]


def routing_version(model: nn.Module, rate: float | None = None) -> str:
    """Return a hash of the rule and the state of every layer, such as thresholds, at `rate` or the model's own rate."""
    digest = hashlib.sha256()
    for router in routers(model):
        digest.update(json.dumps(rule_to_dict(router.rule), sort_keys=True).encode())
        for value in router.at_rate(router.rate if rate is None else rate):
            digest.update(value.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def decide(model: nn.Module, capture: Capture, rate: float | None = None) -> tuple[Tensor, Tensor]:
    """Recompute the assignment and gates of captured scores, to the last bit, from the model's state at `rate`.

    Raises ValueError if the capture has another version, or if the rule uses more than a token's own expert scores.
    """
    if capture.version != routing_version(model, rate):
        raise ValueError("the capture was made with another rule or with other thresholds; use the model that made it")
    assignment, gates = torch.zeros_like(capture.assignment), torch.zeros_like(capture.gates)
    for layer, router in enumerate(routers(model)):
        rule, state = router.rule, router.at_rate(router.rate if rate is None else rate)
        if rule.scope(training=False) != "token" or rule.num_scores != rule.num_experts:
            raise ValueError(
                f"{type(rule).__name__} routes by more than a token's own expert scores; replay the capture instead"
            )
        # Tokens are computed one at a time, since the last bit of σ may depend on how many are computed together.
        for time, scores in enumerate(capture.scores[layer].to(router.weight.device)):
            routing = rule.route(scores[None, None], state, training=False)
            assignment[layer, time] = routing.assignment[0, 0]
            gates[layer, time] = routing.gates[0, 0].where(routing.assignment[0, 0], 0)
    return assignment, gates


@dataclass(frozen=True, kw_only=True, eq=False)
class _Replayed(Rule):
    """A rule whose assignment (batch, time, experts) is given; its gates are computed from the current scores."""

    rule: Rule
    assignment: Tensor

    @property
    def num_scores(self) -> int:
        return self.rule.num_scores

    def init(self) -> Any:
        return self.rule.init()

    def update(self, state: Any, observation: Observation) -> Any:
        return self.rule.update(state, observation)

    def at_rate(self, state: Any, rate: float) -> Any:
        return self.rule.at_rate(state, rate)

    def route(self, scores: Tensor, state: Any, *, training: bool, group: dist.ProcessGroup | None = None) -> Routing:
        own = self.rule.route(scores, state, training=training, group=group)
        assignment = self.assignment[:, : scores.shape[1]]
        if assignment.shape[:2] != scores.shape[:2]:
            raise ValueError(
                f"the batch has {tuple(scores.shape[:2])} tokens, but its captures have {tuple(assignment.shape[:2])}"
            )
        if own.passthrough is not None:
            raise ValueError(f"{self.rule.label} passes tokens through null slots, which captures do not record")
        gates = self.rule.gates_of(scores, assignment) if isinstance(self.rule, Gated) else own.gates
        return Routing(**{**own._asdict(), "assignment": assignment, "gates": gates})


@contextmanager
def replay(model: nn.Module, captures: Sequence[Capture]) -> Iterator[None]:
    """Route every forward as captured, even in training: sequence b of a batch follows captures[b]; padding is skipped.

    A forward may leave out tokens at the end of a capture. Gates are computed from the current scores, with gradients.
    Observations and losses come from the rules' own decisions. Under activation checkpointing, backward routes again,
    so call it inside the block. Raises ValueError if a batch has a different size or more tokens.
    """
    found = routers(model)
    rules = [router.rule for router in found]
    try:
        for layer, router in enumerate(found):
            own, rows = router.rule, [capture.assignment[layer] for capture in captures]
            assignment = pad_sequence(rows, batch_first=True).to(router.weight.device)
            router.rule = _Replayed(
                num_experts=own.num_experts, experts_per_token=own.experts_per_token, rule=own, assignment=assignment
            )
        yield
    finally:
        for router, rule in zip(found, rules, strict=True):
            router.rule = rule

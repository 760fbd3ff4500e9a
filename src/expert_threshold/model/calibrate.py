"""Cutoffs, and the sketch of scores beside them, measured on text without training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..moe import ExpertChoice, Observation, Routing, scores_not_finite
from .gpt import GPT


@dataclass(frozen=True)
class _ByPools(ExpertChoice):
    """Expert choice in a router whose state is another rule's."""

    def route(self, scores: Tensor, state: Any, *, training: bool, group: dist.ProcessGroup | None = None) -> Routing:
        own = (part.to(scores.device) for part in self.init())
        return super().route(scores, type(self.init())(*own), training=training, group=group)


@torch.no_grad()
def calibrate(
    model: GPT,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    experts_per_token: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[Observation, ...]:
    """Give every layer the mean cutoffs of the batches, each a pool in which expert choice routes, in one pass.

    batches: tokens and the targets that follow them, (batch, time) int64 each; windows from all over the text, as a
    loader has them, are the better pools. Weights stay as they are, and so does the count of optimizer steps; running
    means of a training that goes on begin at what is measured. experts_per_token: at which rate; None is the rule's.
    progress is told the batches done. Returns what was seen. Raises ValueError if a batch is too small for one token
    per expert, or there is none, or scores are not finite; cutoffs stay as they were then.
    """
    rule = model.config.rule
    assert rule is not None
    rate = rule.experts_per_token if experts_per_token is None else experts_per_token
    pooled = _ByPools(rule.num_experts, rate, pool="batch")
    routers = [moe.router for _, moe in model.moe_layers()]
    was_training, rules = model.training, [router.rule for router in routers]
    observations: tuple[Observation, ...] | None = None
    device = model.embed.weight.device
    try:
        model.train()
        for router in routers:
            router.rule = pooled
        for done, (tokens, targets) in enumerate(batches, start=1):
            seen: tuple[Observation, ...] = model(tokens.to(device), targets.to(device)).observations
            observations = seen if observations is None else _add(observations, seen)
            if progress is not None:
                progress(done)
    finally:
        model.train(was_training)
        for router, own in zip(routers, rules, strict=True):
            router.rule = own
    if observations is None:
        raise ValueError("no text to calibrate on; give at least one batch of it")
    for (layer, _), observation in zip(model.moe_layers(), observations, strict=True):
        if told := scores_not_finite(observation, f"layer {layer}"):
            raise ValueError(f"{told}; calibrate a checkpoint of an earlier step")
    for router, observation in zip(routers, observations, strict=True):
        router.calibrate(observation)
    return observations


def _add(a: tuple[Observation, ...], b: tuple[Observation, ...]) -> tuple[Observation, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))

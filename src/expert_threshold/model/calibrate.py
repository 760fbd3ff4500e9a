"""Measures cutoffs and score sketches on a text, without training."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..routing import Observation, scores_not_finite
from .gpt import GPT


@torch.no_grad()
def calibrate(
    model: GPT,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    experts_per_token: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[Observation, ...]:
    """Set the cutoffs of every layer in one pass, to their mean over batches. Each batch is one pool of expert choice.
    Returns the observations.

    batches: tokens and the targets that follow them, each (batch, time) int64. Pools are better if windows come from
    all over the text, as in a loader. Weights and step counts do not change. If training continues, running means start
    from the measured cutoffs. experts_per_token: the rate; None uses the rule's. progress is called with the number of
    batches done. Raises ValueError and leaves cutoffs unchanged if there are no batches, if a batch is too small for
    one token per expert, or if scores are not finite.
    """
    rule = model.config.rule
    assert rule is not None
    rate = rule.experts_per_token if experts_per_token is None else experts_per_token
    pooled = rule.calibration_rule(rate)
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
            observations = seen if observations is None else tuple(map(operator.add, observations, seen))
            if progress is not None:
                progress(done)
    finally:
        model.train(was_training)
        for router, own in zip(routers, rules, strict=True):
            router.rule = own
    if observations is None:
        raise ValueError("there is no text to calibrate on; give at least one batch")
    for (layer, _), observation in zip(model.moe_layers(), observations, strict=True):
        if problem := scores_not_finite(observation, f"layer {layer}"):
            raise ValueError(f"{problem}; calibrate an earlier checkpoint")
    for router, observation in zip(routers, observations, strict=True):
        router.state = router.rule.calibrated(router.state, observation)
    return observations

"""Initialises a Mixture-of-Experts model from a dense model ("sparse upcycling")."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..moe import FeedForward, MoE
from ..routing import Rule
from .gpt import GPT, Block, GPTConfig


def upcycled_config(dense: GPTConfig, rule: Rule, *, d_expert: int | None = None, dense_layers: int = 1) -> GPTConfig:
    """Return the configuration for `upcycle`, whose shared experts have the total width of the dense feed-forward.

    d_expert: the width of an expert; None uses the configured one. Raises ValueError if the model is not dense, if it
    does not divide the width of the feed-forward, or if the rule adds the tokens themselves, like copying null slots.
    """
    if dense.rule is not None:
        raise ValueError("the model already has experts; upcycle a model that was trained with --rule dense")
    if rule.route(torch.zeros(1, 1, rule.num_scores), rule.init(), training=False).passthrough is not None:
        raise ValueError(
            f"{rule} adds a multiple of each token, so the model would not compute the same function as the dense "
            "model; use another rule"
        )
    d_expert = dense.d_expert if d_expert is None else d_expert
    if d_expert < 1 or dense.d_feed_forward % d_expert:
        raise ValueError(
            f"d_expert={d_expert} must divide d_feed_forward={dense.d_feed_forward}, so that shared experts can fill it"
        )
    if not 0 <= dense_layers < dense.layers:
        raise ValueError(f"dense_layers={dense_layers} must be at least 0 and less than layers={dense.layers}")
    shared = dense.d_feed_forward // d_expert
    return replace(dense, rule=rule, d_expert=d_expert, shared_experts=shared, dense_layers=dense_layers)


@torch.no_grad()
def upcycle(dense: GPT, config: GPTConfig, generator: torch.Generator) -> GPT:
    """Return a model for `upcycled_config` that computes the same function as the dense model, however it routes.

    The shared expert is the dense feed-forward. Each routed expert copies the input weights of random hidden units and
    starts with zero output weights, as in the paper's initialisation, so it adds nothing until it learns. Routers and
    rule states start as in a new model.
    Raises ValueError if a weight is not finite.
    """
    for name, weight in dense.named_parameters():
        if not weight.isfinite().all():
            raise ValueError(f"weight {name} is not finite; upcycle an earlier checkpoint")
    model = GPT(config, dense.compute_dtype)
    there = model.state_dict()
    model.load_state_dict({name: w for name, w in dense.state_dict().items() if name in there}, strict=False)
    for layer, moe in model.moe_layers():
        old = dense.blocks[layer]
        assert isinstance(old, Block)
        assert old.feed_forward is not None
        _fill(moe, old.feed_forward, generator)
    return model.train(dense.training)


def _fill(moe: MoE, dense: FeedForward, generator: torch.Generator) -> None:
    assert moe.shared is not None
    moe.shared.load_state_dict(dense.state_dict())
    moe.router.weight.normal_(0, moe.router.weight.shape[1] ** -0.5, generator=generator)
    experts, hidden = moe.experts, dense.up.weight.shape[0]
    experts.down.zero_()
    for i in range(len(experts.up)):
        units = torch.randperm(hidden, generator=generator)[: experts.up.shape[1]].to(dense.up.weight.device)
        experts.up[i] = dense.up.weight[units]
        if experts.gate is not None and dense.gate is not None:
            experts.gate[i] = dense.gate.weight[units]

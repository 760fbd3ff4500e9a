"""A dense model as the start of a Mixture-of-Experts one (sparse upcycling)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..moe import MoE, Rule
from ..moe.experts import FeedForward
from .gpt import GPT, Block, GPTConfig


def upcycled_config(dense: GPTConfig, rule: Rule, *, d_expert: int | None = None, dense_layers: int = 1) -> GPTConfig:
    """The model that `upcycle` makes: shared experts of together the width of the dense feed-forward.

    d_expert: width of an expert; None is the configuration's. Raises ValueError if the model is not dense, or the width
    does not divide that of its feed-forward.
    """
    if dense.rule is not None:
        raise ValueError("the model has experts already; upcycle one that was trained with --rule dense")
    d_expert = dense.d_expert if d_expert is None else d_expert
    if d_expert < 1 or dense.d_feed_forward % d_expert:
        raise ValueError(
            f"d_expert={d_expert} must divide d_feed_forward={dense.d_feed_forward}, which the shared experts take over"
        )
    if not 0 <= dense_layers < dense.layers:
        raise ValueError(f"dense_layers={dense_layers} must be from 0 to below layers={dense.layers}")
    shared = dense.d_feed_forward // d_expert
    return replace(dense, rule=rule, d_expert=d_expert, shared_experts=shared, dense_layers=dense_layers)


@torch.no_grad()
def upcycle(dense: GPT, config: GPTConfig, generator: torch.Generator) -> GPT:
    """A model of `upcycled_config` that computes what the dense one does, whatever the routing.

    The shared expert is the dense feed-forward. A routed expert has the input weights of some of its hidden units,
    drawn for each expert anew, and output weights of zero, as the paper begins with: experts add nothing until they
    have learned something, each from the tokens it gets. Routers and the rules' states begin as in a new model.
    Raises ValueError if a weight is not finite.
    """
    for name, weight in dense.named_parameters():
        if not weight.isfinite().all():
            raise ValueError(f"weight {name} is not finite; upcycle a checkpoint of an earlier step")
    model = GPT(config, dense.compute_dtype)
    for new, old in zip(model.blocks, dense.blocks, strict=True):
        assert isinstance(new, Block)
        assert isinstance(old, Block)
        new.attention.load_state_dict(old.attention.state_dict())
        assert old.feed_forward is not None
        if new.moe is None:
            assert new.feed_forward is not None
            new.feed_forward.load_state_dict(old.feed_forward.state_dict())
        else:
            _fill(new.moe, old.feed_forward, generator)
    model.embed.weight.copy_(dense.embed.weight)
    model.head.weight.copy_(dense.head.weight)
    return model.train(dense.training)


def _fill(moe: MoE, dense: FeedForward, generator: torch.Generator) -> None:
    assert moe.shared is not None
    moe.shared.load_state_dict(dense.state_dict())
    moe.router.weight.normal_(0, moe.router.weight.shape[1] ** -0.5, generator=generator)
    experts, hidden = moe.experts, dense.up.weight.shape[0]
    experts.down.zero_()
    for i in range(len(experts.up)):
        units = torch.randperm(hidden, generator=generator)[: experts.up.shape[1]]
        experts.up[i] = _rows(dense.up.weight, units)
        if experts.gate is not None and dense.gate is not None:
            experts.gate[i] = _rows(dense.gate.weight, units)


def _rows(weight: Tensor, units: Tensor) -> Tensor:
    return weight[units.to(weight.device)]

"""Splits a model's experts over ranks, from outside the model, once its weights are loaded."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ..routing import Rule
from .backends import BACKENDS
from .backends.expert_parallel import OwnExperts, Split
from .layer import MoE


def shard_experts(module: nn.Module, group: dist.ProcessGroup, *, micro_batch: tuple[int, int] | None = None) -> None:
    """Keep this rank's shard of the experts in every MoE layer of `module`; tokens travel to the owners of the others.

    Call it on all ranks of the group, with equal weights, before creating optimizers. Each rank then computes its own
    tokens, any number of them; forward and backward must be called on all ranks of the group alike. An expert's
    gradient is the sum over the group's ranks, complete at its owner: if a loss is the mean over W ranks, average other
    parameters' gradients over the W, and sum experts' over the ranks that hold the same experts, divided by W.

    micro_batch: sequences and their length, equal on all ranks. Training then uses equal splits, padded to the capacity
    bound, whose sizes need no communication or synchronization. The rule must bound the tokens that one rank sends to
    an expert, see `equal_split`. None: uneven splits, whose sizes are sent first, as always in inference.

    Raises ValueError, on all ranks, if the experts do not divide by the ranks, or if equal splits are not possible.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, MoE)]
    ranks = dist.get_world_size(group)
    for layer in layers:
        require_even_split(layer.router.rule.num_experts, ranks)
        if isinstance(layer.experts, OwnExperts):
            raise ValueError("experts are split already; call shard_experts once")
    if micro_batch is not None:
        _require_same(micro_batch, group, layers[0].router.weight.device if layers else None)
    splits = [None if micro_batch is None else equal_split(layer.router.rule, micro_batch, ranks) for layer in layers]
    for layer, split in zip(layers, splits, strict=True):
        layer.experts = OwnExperts(layer.experts, layer.dispatch, group, split)
        layer.dispatch = BACKENDS["expert_parallel"]


def require_even_split(num_experts: int, ranks: int) -> None:
    """Raise ValueError unless the experts divide evenly by the ranks."""
    if num_experts % ranks:
        raise ValueError(
            f"num_experts={num_experts} cannot be split over {ranks} ranks; use a number of ranks that divides it"
        )


def equal_split(rule: Rule, micro_batch: tuple[int, int], ranks: int) -> Split:
    """Return the equal split of training. micro_batch: sequences, length.

    One rank sends another at most as many rows as there are experts times `rule.max_load` of this rank's tokens, and at
    most as many as it has tokens. A global pool bounds what an owner receives from all ranks together, not from one;
    token choice and thresholds without bounds bound nothing.

    Raises ValueError if there is no bound.
    """
    tokens = micro_batch[0] * micro_batch[1]
    load = rule.max_load(tokens, training=True, ranks=ranks)
    if load is None:
        raise ValueError(
            f"rule={rule!r} does not bound an expert's load from one rank, so equal splits could overflow; use splits "
            "by count, or a rule with pools of one rank and capacity bounds"
        )
    return Split(min(rule.num_experts // ranks * load, tokens), tokens, rule.num_experts * load)


def _require_same(micro_batch: tuple[int, int], group: dist.ProcessGroup, device: torch.device | None) -> None:
    mine = torch.tensor(micro_batch, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    if any(not torch.equal(mine, other) for other in everyone):
        sizes = ", ".join(" × ".join(map(str, other.tolist())) for other in everyone)
        raise ValueError(f"micro_batch differs between ranks: {sizes}; give one size, or use splits by count")


def expert_parameters(module: nn.Module) -> dict[str, dist.ProcessGroup]:
    """Return the names of split experts' parameters, each with the group over which it is split."""
    return {
        f"{path}.{name}".removeprefix("."): own.group
        for path, own in module.named_modules()
        if isinstance(own, OwnExperts)
        for name, _ in own.named_parameters()
    }

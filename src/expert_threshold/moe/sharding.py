"""Splits the experts of a model over ranks, from outside the model, after its weights are loaded."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from .backends import Backend
from .backends.expert_parallel import OwnExperts, expert_parallel_sum
from .layer import MoE


class ExpertParallel(Backend):
    """Sends tokens to the ranks that own their experts, as `OwnExperts`, where the layer's backend computes them."""

    name = "expert_parallel"
    routed_sum = staticmethod(expert_parallel_sum)


def shard_experts(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Keep only this rank's experts in every MoE layer of `module`; other ranks compute the other experts.

    Call it on all ranks of the group, with equal weights, before creating optimizers. Each rank then computes its own
    tokens, whose number may differ, but all ranks must call forward and backward equally often. The owner of an expert
    receives the sum of its gradients over the group. If the loss is a mean over W ranks, average the gradients of other
    parameters over them; sum experts' gradients over the ranks with the same experts, and divide by W.

    Raises ValueError, on all ranks, if the experts do not divide evenly by the ranks.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, MoE)]
    ranks = dist.get_world_size(group)
    for layer in layers:
        require_even_split(layer.router.rule.num_experts, ranks)
        if isinstance(layer.experts, OwnExperts):
            raise ValueError("experts are already split; call shard_experts only once")
    for layer in layers:
        layer.experts = OwnExperts(layer.experts, layer.dispatch, group)
        layer.dispatch = ExpertParallel()


def require_even_split(num_experts: int, ranks: int) -> None:
    """Raise ValueError unless the experts divide evenly by the ranks."""
    if num_experts % ranks:
        raise ValueError(
            f"num_experts={num_experts} cannot be split over {ranks} ranks; use a number of ranks that divides it"
        )


def expert_parameters(module: nn.Module) -> dict[str, dist.ProcessGroup]:
    """Return the groups over which experts are split, keyed by the names of the experts' parameters."""
    return {
        f"{path}.{name}".removeprefix("."): own.group
        for path, own in module.named_modules()
        if isinstance(own, OwnExperts)
        for name, _ in own.named_parameters()
    }

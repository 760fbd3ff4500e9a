"""How a model is laid out over ranks: applied from outside, once its weights are there."""

from __future__ import annotations

from torch import nn

from ..model import GPT
from ..moe.dispatch.expert_parallel import shard_experts
from ..optim import Member, OptimConfig, Replicated, Shares, Slice, Unshared, moves_matrices, whole
from .config import TrainConfig
from .parallel import DP, Parallel


def lay_out(model: GPT, optim: OptimConfig, config: TrainConfig, parallel: Parallel) -> Shares:
    """What this rank moves of the model. Call it on all ranks, with equal weights on their devices."""
    if parallel.world is None:
        return Unshared(dict(model.named_parameters()))
    for _, moe in model.moe_layers():
        moe.router.group = parallel.world
    if parallel.ep is not None:
        shard_experts(model, parallel.ep)
    return Replicated(_member(name, parameter, optim, parallel) for name, parameter in model.named_parameters())


def _member(name: str, parameter: nn.Parameter, optim: OptimConfig, parallel: Parallel) -> Member:
    assert parallel.world is not None
    divisible = parameter.ndim > 2 or not moves_matrices(name, parameter, optim)
    where, group = _place(name, parameter, parallel), parallel.world
    if is_split(name, parallel):
        assert parallel.mesh is not None
        group = parallel.mesh.get_group(DP)
    return Member(name, parameter, divisible, where, group)


def is_split(name: str, parallel: Parallel) -> bool:
    """Whether a parameter of that name is one of experts that ranks hold together."""
    return parallel.ep is not None and "experts" in name.split(".")


def _place(name: str, parameter: nn.Parameter, parallel: Parallel) -> Slice:
    """Where this rank's part of a parameter lies in the whole."""
    if not is_split(name, parallel):
        return whole(parameter)
    assert parallel.ep is not None
    count, rank, ranks = len(parameter), parallel.ep.rank(), parallel.ep.size()
    return Slice(rank * count, (rank + 1) * count, (ranks * count, *parameter.shape[1:]))

"""How a model is laid out over ranks: applied from outside, once its weights are there."""

from __future__ import annotations

from torch import nn

from ..model import GPT
from ..optim import Member, OptimConfig, Replicated, Shares, Unshared, moves_matrices, whole
from .config import TrainConfig
from .parallel import Parallel


def lay_out(model: GPT, optim: OptimConfig, config: TrainConfig, parallel: Parallel) -> Shares:
    """What this rank moves of the model. Call it on all ranks, with equal weights on their devices."""
    if parallel.world is None:
        return Unshared(dict(model.named_parameters()))
    for _, moe in model.moe_layers():
        moe.router.group = parallel.world
    return Replicated(_member(name, parameter, optim, parallel) for name, parameter in model.named_parameters())


def _member(name: str, parameter: nn.Parameter, optim: OptimConfig, parallel: Parallel) -> Member:
    assert parallel.world is not None
    divisible = parameter.ndim > 2 or not moves_matrices(name, parameter, optim)
    return Member(name, parameter, divisible, whole(parameter), parallel.world)

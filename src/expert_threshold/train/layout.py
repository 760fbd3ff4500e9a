"""How a model is laid out over ranks: applied from outside, once its weights are there."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import nn

from ..model import GPT
from ..moe.dispatch.expert_parallel import expert_parameters, shard_experts
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
    split = expert_parameters(model)
    if config.shard:
        return _shard_all(model, optim, parallel, split)
    return Replicated(
        _member(name, parameter, optim, parallel, name in split) for name, parameter in model.named_parameters()
    )


def _member(name: str, parameter: nn.Parameter, optim: OptimConfig, parallel: Parallel, split: bool) -> Member:
    """split: whether it is one of experts that ranks hold together."""
    assert parallel.world is not None
    where, group = _place(parameter, parallel, split), parallel.world
    if split:
        assert parallel.mesh is not None
        group = parallel.mesh.get_group(DP)
    return Member(name, parameter, _is_divisible(name, parameter, optim), where, group)


def _shard_all(model: GPT, optim: OptimConfig, parallel: Parallel, split: Collection[str]) -> Shares:
    from ..optim.sharded import Shard, Sharded  # takes seconds to import

    rows = {name: len(parameter) for name, parameter in model.named_parameters()}
    _fully_shard(model, parallel)
    return Sharded(
        Shard(
            name,
            parameter,
            _is_divisible(name, parameter, optim),
            *_shard(parameter, rows[name], parallel, name in split),
        )
        for name, parameter in model.named_parameters()
    )


def _is_divisible(name: str, parameter: nn.Parameter, optim: OptimConfig) -> bool:
    return parameter.ndim > 2 or not moves_matrices(name, parameter, optim)


def _fully_shard(model: GPT, parallel: Parallel) -> None:
    """Split parameters, gradients and so optimizer state. Blocks are gathered one ahead, in the compute dtype.

    The router, the embedding and the head stay float32: theirs are no plain products in the compute dtype.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    assert parallel.line is not None
    assert parallel.mesh is not None
    rounded = MixedPrecisionPolicy(param_dtype=model.compute_dtype, reduce_dtype=torch.float32)
    for _, moe in model.moe_layers():
        fully_shard(moe.router, mesh=parallel.line)
        if parallel.ep is not None:
            fully_shard(moe.experts, mesh=parallel.mesh[DP], mp_policy=rounded)
    blocks = [fully_shard(block, mesh=parallel.line, mp_policy=rounded) for block in model.blocks]
    fully_shard(model, mesh=parallel.line)
    for block, following in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])


def _shard(parameter: nn.Parameter, rows: int, parallel: Parallel, split: bool) -> tuple[Slice, dist.ProcessGroup]:
    """Where this rank's part lies, and over which ranks it is split; rows: places before that."""
    assert parallel.world is not None
    group, first, count = parallel.world, 0, rows
    if split:
        assert parallel.mesh is not None
        assert parallel.ep is not None
        group, first, count = parallel.mesh.get_group(DP), parallel.ep.rank() * rows, parallel.ep.size() * rows
    most = -(-rows // group.size())
    start, stop = (min(most * rank, rows) + first for rank in (group.rank(), group.rank() + 1))
    return Slice(start, stop, (count, *parameter.shape[1:])), group


def _place(parameter: nn.Parameter, parallel: Parallel, split: bool) -> Slice:
    """Where this rank's part of a parameter lies in the whole."""
    if not split:
        return whole(parameter)
    assert parallel.ep is not None
    count, rank, ranks = len(parameter), parallel.ep.rank(), parallel.ep.size()
    return Slice(rank * count, (rank + 1) * count, (ranks * count, *parameter.shape[1:]))

"""Distributes a model over ranks, first with expert parallelism and then with ZeRO-1 or FSDP2."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

from ..model import GPT
from ..model.gpt import Block
from ..moe.sharding import expert_parameters, shard_experts
from ..optim import OptimConfig, moves_matrices
from .mesh import DP, Parallel
from .optimizer_shards import LocalParameter, OptimizerShards, Slice
from .zero1 import ZeRO1


def parallelize(model: GPT, optim: OptimConfig, parallel: Parallel) -> OptimizerShards:
    """Distribute the model over the ranks, and return the shards that this rank's optimizers step.

    All ranks must call this with equal weights, which must already be on their devices.
    """
    if parallel.world is None:
        return OptimizerShards(dict(model.named_parameters()))
    for _, moe in model.moe_layers():
        moe.router.group = parallel.world
    if parallel.ep is not None:
        shard_experts(model, parallel.ep)
    split = expert_parameters(model)
    rows = {name: len(parameter) for name, parameter in model.named_parameters()}
    if parallel.shard:
        _fully_shard(model, parallel)
    held = [
        LocalParameter(
            name,
            parameter,
            # Optimizers update the rows of a stack independently, but Muon updates a matrix as a whole.
            parameter.ndim > 2 or not moves_matrices(name, parameter, optim),
            *_place(rows[name], parameter.shape, parallel, name in split),
        )
        for name, parameter in model.named_parameters()
    ]
    if not parallel.shard:
        return ZeRO1(held)
    from .fsdp import FSDP  # takes seconds to import

    return FSDP(held, with_weights=optim.weight_decay > 0)


def _place(rows: int, shape: torch.Size, parallel: Parallel, split: bool) -> tuple[Slice, dist.ProcessGroup]:
    """Return this rank's slice of a full parameter, and the ranks that share it.

    rows: this rank's number of rows before `fully_shard`, which splits them into equal chunks, of which the last ones
    may be smaller or empty. split: the parameter belongs to experts that are split over ranks.
    """
    assert parallel.world is not None
    group, first, count = parallel.world, 0, rows
    if split:
        assert parallel.mesh is not None
        assert parallel.ep is not None
        group, first, count = parallel.mesh.get_group(DP), parallel.ep.rank() * rows, parallel.ep.size() * rows
    start, stop = 0, rows
    if parallel.shard:
        chunk = -(-rows // group.size())
        start, stop = (min(chunk * rank, rows) for rank in (group.rank(), group.rank() + 1))
    return Slice(first + start, first + stop, (count, *shape[1:])), group


def _fully_shard(model: GPT, parallel: Parallel) -> None:
    """Split parameters and gradients with FSDP2. Each block is gathered in the compute dtype during the previous one.

    Routers, embeddings, the head and scalars stay in float32, because not all of the model's operations on them are
    matrix multiplications in the compute dtype.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    assert parallel.flat is not None
    assert parallel.mesh is not None
    rounded = MixedPrecisionPolicy(param_dtype=model.compute_dtype, reduce_dtype=torch.float32)
    for _, moe in model.moe_layers():
        fully_shard(moe.router, mesh=parallel.flat)
        if parallel.ep is not None:
            fully_shard(moe.experts, mesh=parallel.mesh[DP], mp_policy=rounded)
    for block in model.blocks:
        assert isinstance(block, Block)
        if block.attention.value_embed is not None:
            fully_shard(block.attention.value_embed, mesh=parallel.flat)
    blocks = [fully_shard(block, mesh=parallel.flat, mp_policy=rounded) for block in model.blocks]
    fully_shard(model, mesh=parallel.flat)
    for sharded, following in itertools.pairwise(blocks):
        sharded.set_modules_to_forward_prefetch([following])

"""Creates all process groups and device meshes, and divides a batch among ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..routing import Rule
from .rendezvous import ALONE, MIN_HEARTBEAT_TIMEOUT, Rendezvous, is_lost_rank

DP, EP = "dp", "ep"
CPU = torch.device("cpu")


class Status(NamedTuple):
    """The status of one rank, in which each field is 0 or 1. After an all-reduce, each field is a number of ranks.

    Ranks exchange their status at every step, so that all of them save, stop or fail at the same step.
    """

    stop: int = 0  # a signal asked the run to stop
    saving: int = 0  # a checkpoint is being written
    written: int = 0  # this rank's files of the checkpoint are complete
    failed: int = 0  # this rank could not write its files


@dataclass(frozen=True)
class Parallel:
    """The ranks that train a model, including this process. By default, a single process without process groups.

    Every rank sees different data. A layer's experts are split over the `ep` dimension of the mesh (dp, ep).
    """

    ranks: Rendezvous = ALONE
    device: torch.device = CPU
    world: dist.ProcessGroup | None = None  # all ranks; accepts CPU tensors too
    flat: DeviceMesh | None = None  # all ranks in one dimension
    mesh: DeviceMesh | None = None  # (dp, ep)
    shard: bool = False  # FSDP2 splits parameters, gradients and optimizer state over all ranks

    def all_reduce(self, status: Status) -> Status:
        """Return the sum of the statuses of all ranks."""
        total = torch.tensor(status, device=self.device)
        dist.all_reduce(total, group=self.world)
        return Status(*total.tolist())

    @property
    def ep(self) -> dist.ProcessGroup | None:
        """The ranks over which a layer's experts are split, or None if every rank holds all experts."""
        return None if self.mesh is None or self.mesh[EP].size() == 1 else self.mesh.get_group(EP)

    @property
    def splits_model(self) -> bool:
        """True if no rank holds the whole model."""
        return self.shard or self.ep is not None


class LocalBatch(NamedTuple):
    """One rank's part of an optimizer step, which consists of `accumulation` micro-batches of `batch_size` sequences.

    ranks: number of ranks that share each micro-batch. joint_mean: the loss is the mean over the targets of all of
    these ranks. Otherwise, each rank's part counts as a separate micro-batch.
    """

    batch_size: int
    accumulation: int
    ranks: int = 1
    joint_mean: bool = False

    @property
    def pooled(self) -> int:
        """The number of sequences that a rule sees together: a whole micro-batch, or only this rank's part."""
        return self.batch_size * self.ranks if self.joint_mean else self.batch_size


def competes_on_rank(rule: Rule | None) -> bool:
    """Return True if the rule's tokens compete only within one rank's part of a micro-batch."""
    return rule is not None and "batch" in (rule.scope(training=True), rule.pool_scope())


def local_batch(batch_size: int, accumulation: int, rule: Rule | None, ranks: int) -> LocalBatch:
    """Return each rank's part of `accumulation` micro-batches of `batch_size` sequences.

    Ranks share the sequences of each micro-batch, which makes pools smaller if the rule's tokens compete within a rank.
    With such a rule, each rank gets whole micro-batches instead if their number is divisible by the number of ranks.
    Raises ValueError if ranks have to share sequences whose number is not divisible by the number of ranks.
    """
    alone = competes_on_rank(rule)
    if ranks == 1 or (alone and accumulation % ranks == 0):
        return LocalBatch(batch_size, accumulation // ranks)
    if ranks > batch_size:
        raise ValueError(
            f"{ranks} ranks cannot share the {batch_size} sequences of a micro-batch; launch fewer ranks, or give a "
            "larger --batch-size"
        )
    if batch_size % ranks:
        raise ValueError(
            f"batch_size={batch_size} is not divisible by {ranks} ranks; use a multiple of {ranks}, or launch a "
            "number of ranks that divides it"
        )
    return LocalBatch(batch_size // ranks, accumulation, ranks, joint_mean=not alone)


def mesh_sizes(world_size: int, expert_parallel: int) -> tuple[int, int]:
    """Return the sizes of the dimensions (dp, ep). Raises ValueError if ep does not divide the number of ranks."""
    if world_size % expert_parallel:
        raise ValueError(
            f"expert_parallel={expert_parallel} does not divide the {world_size} ranks; launch a multiple of "
            f"{expert_parallel}, or use --train.expert-parallel 1"
        )
    return world_size // expert_parallel, expert_parallel


def local_device(device: torch.device, local_rank: int, local_world_size: int) -> torch.device:
    """Return this rank's device. Raises ValueError if the machine has fewer devices than ranks."""
    if device.type == "cuda":
        if local_world_size > torch.cuda.device_count():
            raise ValueError(
                f"{local_world_size} ranks run on this machine, which has only {torch.cuda.device_count()} GPUs; "
                "launch one rank per GPU"
            )
        return torch.device("cuda", local_rank)
    if device.type != "cpu":
        raise ValueError(f"device={device} does not support several ranks; use --device cpu")
    return device


@contextmanager
def process_groups(
    rendezvous: Rendezvous, device: torch.device, *, expert_parallel: int = 1, shard: bool = False, timeout: int
) -> Iterator[Parallel]:
    """Create the process groups, which exist within the context. A single process has none.

    Collectives fail after `timeout` seconds without a response. Raises ValueError if the mesh or the devices do not
    match the number of ranks, or if the ranks cannot connect.
    """
    sizes = mesh_sizes(rendezvous.world_size, expert_parallel)
    if rendezvous.is_alone:
        yield Parallel(device=device)
        return
    rendezvous.heartbeat_timeout = max(timeout, MIN_HEARTBEAT_TIMEOUT)
    device = local_device(device, rendezvous.local_rank, rendezvous.local_world_size)
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(
            backend, None, timedelta(seconds=timeout), rendezvous.world_size, rendezvous.rank, rendezvous.group_store
        )
    except RuntimeError as error:
        if is_lost_rank(error):
            raise
        raise ValueError(f"this rank cannot connect to the others: {' '.join(str(error).split())}") from error
    flat = init_device_mesh(device.type, (rendezvous.world_size,), mesh_dim_names=("all",))
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=(DP, EP))
    yield Parallel(rendezvous, device, dist.group.WORLD, flat, mesh, shard)
    # Not in a `finally`: after an error, other ranks may be waiting for this one, and only its exit stops them.
    dist.destroy_process_group()

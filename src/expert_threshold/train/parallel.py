"""Meshes and process groups, made here alone, and the launch of a process for each rank.

A rank is one process with one device. All ranks see different data; `dp × ep` of them hold the experts `ep` ways.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..model import Rule
from .config import TrainConfig
from .device import pick_device
from .meeting import LEAST_PATIENCE, Meeting, from_first

DP, EP = "dp", "ep"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Parallel:
    """This process among those that train one model; by default there is no other, and no group."""

    rank: int = 0
    ranks: int = 1
    local_ranks: int = 1  # on this machine
    device: torch.device = CPU
    world: dist.ProcessGroup | None = None  # all ranks; carries tensors of the CPU too
    line: DeviceMesh | None = None  # all ranks in one dimension
    mesh: DeviceMesh | None = None  # (dp, ep)
    meeting: Meeting | None = None
    splits_model: bool = False  # no rank has it all

    @property
    def leads(self) -> bool:
        """Whether this is the rank that prints and writes what all know."""
        return self.rank == 0

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What `make` returns on the first rank, as JSON keeps it; all ranks call this in the same order."""
        return from_first(self.meeting, make)

    @property
    def ep(self) -> dist.ProcessGroup | None:
        """The ranks that hold a layer's experts together; None where each holds them all."""
        return None if self.mesh is None or self.mesh[EP].size() == 1 else self.mesh.get_group(EP)


def mesh_sizes(ranks: int, expert_parallel: int) -> tuple[int, int]:
    """dp and ep of so many ranks. Raises ValueError where they do not multiply out."""
    if ranks % expert_parallel:
        raise ValueError(
            f"expert_parallel={expert_parallel} does not divide the {ranks} ranks; launch a multiple of "
            f"{expert_parallel}, or give --expert-parallel 1"
        )
    return ranks // expert_parallel, expert_parallel


class Portion(NamedTuple):
    """A rank's part of a step: micro-batches of so many sequences, and how many.

    sharers: ranks that share a micro-batch. one_mean: whether its loss is one mean over their tokens; else each forms
    its own, as micro-batches do.
    """

    batch_size: int
    accumulation: int
    sharers: int = 1
    one_mean: bool = False


def portion_of(config: TrainConfig, rule: Rule | None, ranks: int) -> Portion:
    """What each rank gets of a step, so that ranks change nothing: they share the sequences of each micro-batch.

    Where tokens compete on one rank only, that would change pools: ranks get whole micro-batches if there are enough.
    Raises ValueError where neither divides.
    """
    batch_size, accumulation = config.batch_size, config.accumulation
    on_rank = rule is not None and "batch" in (rule.scope(training=True), rule.pool_scope())
    if ranks == 1 or (on_rank and accumulation % ranks == 0):
        return Portion(batch_size, accumulation // ranks)
    if ranks > batch_size:
        raise ValueError(
            f"{ranks} ranks are more than the {batch_size} sequences of a micro-batch; launch fewer, or give a larger "
            "--batch-size"
        )
    if batch_size % ranks:
        raise ValueError(
            f"batch_size={batch_size} sequences do not divide by {ranks} ranks; give a multiple of {ranks}, or launch "
            "a number of ranks that divides it"
        )
    return Portion(batch_size // ranks, accumulation, ranks, one_mean=not on_rank)


def local_device(name: str, local_rank: int, local_ranks: int) -> torch.device:
    """This rank's device of that name. Raises ValueError where there are fewer than local ranks."""
    device = pick_device(name)
    if device.type == "cuda":
        if local_ranks > torch.cuda.device_count():
            raise ValueError(
                f"{local_ranks} ranks on this machine but {torch.cuda.device_count()} GPUs; launch one rank for each"
            )
        return torch.device("cuda", local_rank)
    if device.type != "cpu":
        raise ValueError(f"device={name}: several ranks take cpu or cuda; use --device cpu")
    return device


@contextmanager
def joined(meeting: Meeting | None, config: TrainConfig) -> Iterator[Parallel]:
    """The groups of all ranks, while entered. meeting: of `meeting.meet`, None where this process is alone.

    Collectives fail after `config.timeout` seconds without an answer. Raises ValueError for a mesh or devices that do
    not fit the ranks.
    """
    if meeting is None:
        mesh_sizes(1, config.expert_parallel)
        yield Parallel(device=pick_device(config.device))
        return
    meeting.patience = max(config.timeout, LEAST_PATIENCE)
    sizes = mesh_sizes(meeting.ranks, config.expert_parallel)
    device = local_device(config.device, meeting.local_rank, meeting.local_ranks)
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        store=meeting.store_of_groups,
        rank=meeting.rank,
        world_size=meeting.ranks,
        timeout=timedelta(seconds=config.timeout),
    )
    line = init_device_mesh(device.type, (meeting.ranks,), mesh_dim_names=("all",))
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=(DP, EP))
    yield Parallel(
        meeting.rank,
        meeting.ranks,
        meeting.local_ranks,
        device,
        dist.group.WORLD,
        line,
        mesh,
        meeting,
        splits_model=config.shard or config.expert_parallel > 1,
    )
    dist.destroy_process_group()  # after an error others may still wait for this rank: its end is what tells them


LOST = re.compile("gloo|nccl|connection|timed out|socket|broken pipe|recv|heartbeat", re.IGNORECASE)


def is_lost_rank(error: BaseException) -> bool:
    """Whether that is what a collective raises when another rank has ended, or does not answer."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and bool(LOST.search(str(error))))


def launch(arguments: Sequence[str], processes: int) -> int:
    """Run `et ARGUMENTS` in so many processes on this machine, as torchrun does, and return the exit code.

    SIGINT and SIGTERM are passed on, and the ranks waited for.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Each rank says itself what went wrong. A level would not do: torch gives each logger below its own.
    launcher = logging.getLogger("torch.distributed.elastic")
    launcher.addHandler(logging.NullHandler())
    launcher.propagate = False
    cores = os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, run_id="none", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0,
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)("-m", __package__.split(".")[0], *arguments)
    except ChildFailedError as failed:
        codes = [failure.exitcode for failure in failed.failures.values()]
        return max(codes) if max(codes) > 0 else 1  # a signal's number is negative
    except SignalException as stopped:
        return 128 + stopped.sigval
    return 0

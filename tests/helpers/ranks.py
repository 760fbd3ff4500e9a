"""Tests that take several processes: one for each rank, joined by gloo on this machine."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def run_on_ranks(script: Path, ranks: int, folder: Path, *more: str) -> None:
    """Call `main(rank, ranks, folder, *more)` of a script in a process for each rank. All must succeed.

    folder: an empty folder. The processes are forks of a server that has imported torch, since importing it would take
    most of the time.
    """
    start_processes(_run, (script, ranks, folder, *more), nprocs=ranks, daemon=True, start_method="forkserver")


def _run(rank: int, script: Path, *arguments: Any) -> NoReturn:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    sys.path.insert(0, str(script.parent))
    importlib.import_module(script.stem).main(rank, *arguments)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a normal exit sometimes aborts in one of torch's threads on a loaded machine


def join(rank: int, ranks: int, folder: Path) -> dist.ProcessGroup:
    """Join the group of all ranks, and return it."""
    file = f"file://{folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    return dist.group.WORLD


def mine(values: torch.Tensor, shares: tuple[int, ...], rank: int) -> torch.Tensor:
    """Return this rank's share of values that all ranks know."""
    return values.split(shares)[rank]


class Collectives(TorchDispatchMode):
    """While in force, lists the collective operations of this rank, as `alltoall_base_` and the like, and adds up the
    bytes of all tensors handed to them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.append(func._schema.name.split("::")[1])
            self.bytes += sum(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
        return func(*args, **(kwargs or {}))

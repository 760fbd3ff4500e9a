"""Tests that take several processes: one for each rank, joined by gloo on this machine."""

from __future__ import annotations

import os
import runpy
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
    """Run `python script RANK RANKS RENDEZVOUS_FILE MORE…` for every rank; each has to exit with 0. folder: an empty
    one.

    Ranks are forks of a server that has imported torch: imports would take most of the time.
    """
    arguments = (script, str(ranks), str(folder / "rendezvous"), *more)
    start_processes(_run, arguments, nprocs=ranks, daemon=True, start_method="forkserver")


def _run(rank: int, script: Path, *arguments: str) -> None:
    warnings.simplefilter("error")
    sys.argv = [str(script), str(rank), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def join() -> tuple[int, int, dist.ProcessGroup]:
    """Join the group of all ranks, in such a script; return the rank, the number of ranks and the group."""
    rank, ranks, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    return rank, ranks, dist.group.WORLD


def mine(values: torch.Tensor, shares: tuple[int, ...], rank: int) -> torch.Tensor:
    """Return this rank's share of values that all ranks know."""
    return values.split(shares)[rank]


def leave() -> NoReturn:
    """The end of such a script in the place of the interpreter's, where a thread of torch's may abort it.

    So it was seen on a loaded machine, after all checks had passed.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


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

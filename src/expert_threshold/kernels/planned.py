"""Assumptions about tensors without data (torch's meta device), on which a plan runs a step to measure its memory:
facts that decide code paths and shapes but depend on the device or the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Planned(NamedTuple):
    """cpu: run on a CPU, else on a GPU of compute capability 9.x. fanout: of every token, at even loads. ranks:
    that share a global pool.
    """

    cpu: bool
    fanout: float = 1
    ranks: int = 1


# A global of the module, since torch.compile guards on globals but breaks the graph at a context variable. Only
# `ranks_of` reads it for tensors with data, so nothing may train in another thread while a plan is made.
_planned: Planned | None = None


@contextmanager
def planned(assumed: Planned) -> Iterator[None]:
    """Let tensors without data run as assumed; they still compute nothing."""
    global _planned
    before, _planned = _planned, assumed
    try:
        yield
    finally:
        _planned = before


def on_cpu(x: Tensor) -> bool:
    """Return True if x is on a CPU, or stands for a tensor on one."""
    return x.is_cpu or (x.is_meta and _planned is not None and _planned.cpu)


def on_hopper(x: Tensor) -> bool:
    """Return True if x is on a GPU of compute capability 9.x, or stands for a tensor on one."""
    if x.is_cuda:
        # Not 10.x: there grouped_mm makes gradients of experts without tokens that are not zero (pytorch #172439).
        return torch.cuda.get_device_capability(x.device)[0] == 9
    return x.is_meta and _planned is not None and not _planned.cpu


def ranks_of(group: dist.ProcessGroup | None) -> int:
    """Return the size of the group; without one there is a single rank, or as many as planned."""
    if group is not None:
        return dist.get_world_size(group)
    return 1 if _planned is None else _planned.ranks


def no_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context that switches autocast off on the device of x; an empty one on the meta device."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def as_autocast(x: Tensor) -> Tensor:
    """Return x in the dtype in which `nn.Linear` would multiply it; without autocast x itself."""
    casts = not x.is_meta and x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type)
    return x.to(torch.get_autocast_dtype(x.device.type)) if casts else x


def loads_of(assignment: Tensor) -> list[int]:
    """Return the tokens of each expert in an assignment (tokens, experts) bool, waiting for the device."""
    if not assignment.is_meta:
        loads: list[int] = assignment.sum(0).tolist()
        return loads
    assert _planned is not None, "tensors without data have loads only inside `planned`"
    tokens, experts = assignment.shape
    return [max(round(tokens * _planned.fanout / experts), 1)] * experts


def pairs_of(assignment: Tensor) -> tuple[Tensor, Tensor]:
    """Return the expert and the token of each pair in an assignment, both (pairs,), by expert, then token."""
    if assignment.is_meta:
        pairs = torch.empty(sum(loads_of(assignment)), 2, dtype=torch.int64, device=assignment.device)
    else:
        pairs = assignment.T.nonzero()
    expert, token = pairs.unbind(1)
    return expert, token

"""The bytes that a rule sends between ranks, counted on a process group that sends nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..routing import Rule
from ..routing.observation import summed_over_ranks


class _Count(TorchDispatchMode):
    """Counts the bytes of the tensors that enter collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            # A gather lists its outputs before its inputs; a rank sends its input alone.
            sent = args[1] if "gather" in func.__name__ else args[0]
            self.bytes += sum(leaf.nbytes for leaf in tree_leaves(sent) if isinstance(leaf, Tensor))
        return func(*args, **(kwargs or {}))


def bytes_sent(rule: Rule, micro_batch: tuple[int, int], accumulation: int, ranks: int = 8) -> int | None:
    """Return the bytes that one rank sends in an optimizer step to route one layer and to sum what was observed.

    micro_batch: (batch, time). An all-reduce counts its tensor once, whatever the algorithm. None in a process that
    already is a rank.
    """
    if dist.is_initialized():
        return None
    with _ranks(ranks), _Count() as count, torch.no_grad():
        scores = torch.randn(*micro_batch, rule.num_scores, generator=torch.Generator().manual_seed(0))
        routing = rule.route(scores, rule.init(), training=True, group=dist.group.WORLD)
        in_routing, count.bytes = count.bytes, 0
        assert dist.group.WORLD is not None
        summed_over_ranks([t for t in tree_leaves(routing.observation) if isinstance(t, Tensor)], dist.group.WORLD)
        sent: int = in_routing * accumulation + count.bytes
        return sent


@contextmanager
def _ranks(ranks: int) -> Iterator[None]:
    """Make this process rank 0 of a group in which collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # torch has no public group of this kind

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()

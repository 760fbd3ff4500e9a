"""ZeRO-1: every rank holds all parameters and gradients, but its optimizers only step the rows that it owns.

The gradients of a bucket are reduce-scattered to their owners while backward is still computing other gradients. Each
owner steps its rows with ordinary single-process optimizers, and the rows are all-gathered while the next ones are
stepped. A row is what an optimizer updates independently: a matrix in Muon, a vector in AdamW. torch's
`ZeroRedundancyOptimizer` assigns whole parameters to ranks, so it cannot divide a stack of experts. It also broadcasts
only after the whole step, and requires DDP to reduce every gradient to every rank first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from .optimizer_shards import LocalParameter, OptimizerShards, Slice

BUCKET_BYTES = 32 << 20  # large enough to use a link's bandwidth, small enough to start sending early

# torch 2.13 renames both functions.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _rows(replica: LocalParameter) -> Tensor:
    """Return a view of shape (rows, …), in which a matrix that is updated as a whole is a single row."""
    data = replica.parameter.data
    return data if replica.by_row else data[None]


class _Bucket:
    """Parameters whose rows have the same shape. They and their gradients are views of the bucket's two buffers.

    Rank i of the group owns the i-th run of rows. All runs have the same length; the last ones are padded with zeros.
    """

    def __init__(self, replicas: list[LocalParameter]) -> None:
        self.replicas = replicas
        self.group = replicas[0].group
        rank, ranks = self.group.rank(), self.group.size()
        first = _rows(replicas[0])
        run = -(-sum(len(_rows(replica)) for replica in replicas) // ranks)
        self.weights = first.new_zeros(run * ranks, *first.shape[1:])
        self.gradients = torch.zeros_like(self.weights)
        self.mine = slice(rank * run, (rank + 1) * run)
        self.my_gradients = torch.zeros_like(self.weights[self.mine])
        self.work: dist.Work | None = None
        self.waiting: set[str] = set()  # parameters that have not been updated in this step yet
        self.owned: dict[str, slice] = {}  # this rank's rows, as indices of the buffers
        self.slices: dict[str, Slice] = {}
        begin = 0
        for replica in replicas:
            end = begin + len(_rows(replica))
            start, stop = (min(max(edge, begin), end) for edge in (self.mine.start, self.mine.stop))
            self.owned[replica.name] = slice(start, stop)
            self.slices[replica.name] = _slice(replica, start - begin, stop - begin)
            parameter, shape = replica.parameter, replica.parameter.shape
            parameter.data = self.weights[begin:end].copy_(_rows(replica)).view(shape)
            parameter.grad = self.gradients[begin:end].view(shape)
            begin = end

    def reduce(self) -> None:
        self.work = _reduce_scatter(self.my_gradients, self.gradients, group=self.group, async_op=True)

    def gather(self) -> None:
        self.work = _all_gather(self.weights, self.weights[self.mine], group=self.group, async_op=True)

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None


def _slice(replica: LocalParameter, start: int, stop: int) -> Slice:
    """Return the slice of the full parameter that rows `start` to `stop` of the replica represent."""
    if not replica.by_row:
        return Slice(0, len(replica.parameter) if start < stop else 0, replica.slice.shape)
    return Slice(replica.slice.start + start, replica.slice.start + stop, replica.slice.shape)


class ZeRO1(OptimizerShards):
    """Optimizer shards for replicated parameters. Split experts are sharded over the ranks that hold the same experts.

    The data of parameters is moved into buffers, so they must already be on their device, and no other tensor may share
    memory with them.
    """

    def __init__(self, replicas: Iterable[LocalParameter]) -> None:
        self.buckets = [_Bucket(bucket) for bucket in _filled(replicas)]
        super().__init__({})
        self._bucket_of: dict[str, _Bucket] = {}
        self._is_last_backward = False
        self._missing: list[int] = []
        self._reduced = 0
        for number, bucket in enumerate(self.buckets):
            self.slices |= bucket.slices
            self.parameters |= {name: bucket.weights[rows] for name, rows in bucket.owned.items()}
            self._bucket_of |= dict.fromkeys(bucket.owned, bucket)
            for replica in bucket.replicas:
                replica.parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._on_gradient(number))

    def begin_last_backward(self) -> None:
        self._is_last_backward, self._reduced = True, 0
        self._missing = [len(bucket.replicas) for bucket in self.buckets]

    def _on_gradient(self, number: int) -> None:
        """Reduce the buckets whose gradients are complete, in the same order on every rank."""
        if not self._is_last_backward:
            return
        self._missing[number] -= 1
        while self._reduced < len(self.buckets) and self._missing[self._reduced] == 0:
            self.buckets[self._reduced].reduce()
            self._reduced += 1

    def reduce_gradients(self) -> None:
        for bucket in self.buckets[self._reduced :]:  # held back by parameters without a gradient
            bucket.reduce()
        self._is_last_backward, self._reduced = False, 0
        for bucket in self.buckets:
            bucket.wait()
            bucket.waiting = set(bucket.owned)
            for name, rows in bucket.owned.items():
                first = rows.start - bucket.mine.start
                self.parameters[name].grad = bucket.my_gradients[first : first + rows.stop - rows.start]

    def gather_updated(self, names: Collection[str]) -> None:
        for name in names:
            bucket = self._bucket_of[name]
            bucket.waiting.discard(name)
            if not bucket.waiting:
                bucket.gather()

    def finish_step(self) -> None:
        for bucket in self.buckets:
            bucket.wait()
            bucket.gradients.zero_()
        super().finish_step()


def _filled(replicas: Iterable[LocalParameter]) -> list[list[LocalParameter]]:
    """Group replicas into buckets, in the order in which backward completes them, which is roughly last to first."""
    backward = list(replicas)[::-1]
    closed: list[list[LocalParameter]] = []
    filling: dict[object, list[LocalParameter]] = {}
    for replica in backward:
        kind = (_rows(replica).shape[1:], replica.parameter.dtype, replica.group)
        bucket = filling.setdefault(kind, [])
        bucket.append(replica)
        size = sum(other.parameter.nbytes for other in bucket)
        even = sum(len(_rows(other)) for other in bucket) % replica.group.size() == 0
        if size >= BUCKET_BYTES and (even or size >= 4 * BUCKET_BYTES):
            closed.append(filling.pop(kind))
    position = {replica.name: number for number, replica in enumerate(backward)}
    return sorted([*closed, *filling.values()], key=lambda bucket: position[bucket[-1].name])

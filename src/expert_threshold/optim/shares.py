"""The optimizers' work and state shared out between ranks: each moves the rows of the parameters that it owns.

A step of ranks with equal parameters: the gradients of a bucket are reduce-scattered to owners while backward is still
at work on others, owners move their rows by the optimizers of one process, and the rows are all-gathered while the next
are moved. A row is what an optimizer moves by itself: a matrix under Muon, a vector under AdamW.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 32 << 20  # enough for a link's bandwidth, few enough for the first to be on their way early

# torch 2.13 renames both.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Slice(NamedTuple):
    """Which part of a whole tensor a rank has: places `start` to `stop` of its first dimension."""

    start: int
    stop: int
    shape: tuple[int, ...]  # of the whole

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == self.shape[0]

    def of(self, whole: Tensor) -> Tensor:
        """This part, a view."""
        return whole[self.start : self.stop]


def whole(tensor: Tensor) -> Slice:
    """All of it."""
    return Slice(0, len(tensor), tuple(tensor.shape))


class Shares(Protocol):
    """named: what this rank's optimizers move, by parameter, (rows, …), possibly none. slices: where that lies."""

    named: dict[str, Tensor]
    slices: dict[str, Slice]

    def owned(self) -> dict[str, tuple[Tensor, Slice]]:
        """The weights that this rank has to save: each is owned by exactly one."""

    def last_backward(self) -> None:
        """The next backward is the last before a step: gradients that are complete may leave."""

    def collect(self) -> None:
        """Give what is named its gradient, summed over all ranks."""

    def publish(self, names: Collection[str]) -> None:
        """Begin to bring what is named, and was moved, to every rank that has it."""

    def finish(self) -> None:
        """Wait until the parameters are whole everywhere, and forget their gradients."""


class Unshared:
    """Of one process: it owns everything."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.named = dict(parameters)
        self.slices = {name: whole(parameter) for name, parameter in parameters.items()}

    def owned(self) -> dict[str, tuple[Tensor, Slice]]:
        return _places(self)

    def last_backward(self) -> None:
        pass

    def collect(self) -> None:
        pass

    def publish(self, names: Collection[str]) -> None:
        pass

    def finish(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None


def _places(shares: Shares) -> dict[str, tuple[Tensor, Slice]]:
    return {name: (tensor, shares.slices[name]) for name, tensor in shares.named.items()}


class Member(NamedTuple):
    """A parameter that all ranks of a group have. divisible: its places are moved each by itself."""

    name: str
    parameter: nn.Parameter
    divisible: bool
    slice: Slice  # of the whole parameter; where a layer's experts are split, this rank's
    group: dist.ProcessGroup

    @property
    def rows(self) -> Tensor:
        """(rows, …), a view; a matrix that has to stay whole is one row."""
        data = self.parameter.data
        return data if self.divisible else data[None]


class _Bucket:
    """Members with rows of one shape, whose storage it becomes: parameters and gradients are views of two buffers.

    Rank i of the group owns the i-th of as many equal runs of rows; the last ones are filled up with zeros.
    """

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self.group = members[0].group
        rank, ranks = self.group.rank(), self.group.size()
        first = members[0].rows
        share = -(-sum(len(member.rows) for member in members) // ranks)
        self.weights = first.new_zeros(share * ranks, *first.shape[1:])
        self.gradients = torch.zeros_like(self.weights)
        self.mine = slice(rank * share, (rank + 1) * share)
        self.my_gradients = torch.zeros_like(self.weights[self.mine])
        self.work: dist.Work | None = None
        self.unmoved: set[str] = set()
        self.owned: dict[str, slice] = {}  # this rank's rows, counted in the buffers
        self.slices: dict[str, Slice] = {}
        begin = 0
        for member in members:
            end = begin + len(member.rows)
            start, stop = (min(max(edge, begin), end) for edge in (self.mine.start, self.mine.stop))
            self.owned[member.name] = slice(start, stop)
            self.slices[member.name] = _slice(member, start - begin, stop - begin)
            parameter, shape = member.parameter, member.parameter.shape
            parameter.data = self.weights[begin:end].copy_(member.rows).view(shape)
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


def _slice(member: Member, start: int, stop: int) -> Slice:
    """Of the whole parameter, for these rows of the member."""
    if not member.divisible:
        return Slice(0, len(member.parameter) if start < stop else 0, member.slice.shape)
    return Slice(member.slice.start + start, member.slice.start + stop, member.slice.shape)


class Replicated:
    """Of ranks that all have the parameters, those of split experts by groups of ranks.

    The parameters become views of buffers; call it when they are on their device and before anything refers to them.
    """

    def __init__(self, members: Iterable[Member]) -> None:
        self.buckets = [_Bucket(bucket) for bucket in _filled(members)]
        self.named: dict[str, Tensor] = {}
        self.slices: dict[str, Slice] = {}
        self._bucket_of: dict[str, _Bucket] = {}
        self._armed = False
        self._missing: list[int] = []
        self._reduced = 0
        for number, bucket in enumerate(self.buckets):
            self.slices |= bucket.slices
            self.named |= {name: bucket.weights[rows] for name, rows in bucket.owned.items()}
            self._bucket_of |= dict.fromkeys(bucket.owned, bucket)
            for member in bucket.members:
                member.parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._arrived(number))

    def owned(self) -> dict[str, tuple[Tensor, Slice]]:
        return _places(self)

    def last_backward(self) -> None:
        self._armed, self._reduced = True, 0
        self._missing = [len(bucket.members) for bucket in self.buckets]

    def _arrived(self, number: int) -> None:
        """Reduce every bucket that is complete, in one order on all ranks: none overtakes another."""
        if not self._armed:
            return
        self._missing[number] -= 1
        while self._reduced < len(self.buckets) and self._missing[self._reduced] == 0:
            self.buckets[self._reduced].reduce()
            self._reduced += 1

    def collect(self) -> None:
        for bucket in self.buckets[self._reduced :]:  # of parameters that the loss does not depend on
            bucket.reduce()
        self._armed, self._reduced = False, 0
        for bucket in self.buckets:
            bucket.wait()
            bucket.unmoved = set(bucket.owned)
            for name, rows in bucket.owned.items():
                first = rows.start - bucket.mine.start
                self.named[name].grad = bucket.my_gradients[first : first + rows.stop - rows.start]

    def publish(self, names: Collection[str]) -> None:
        for name in names:
            bucket = self._bucket_of[name]
            bucket.unmoved.discard(name)
            if not bucket.unmoved:
                bucket.gather()

    def finish(self) -> None:
        for bucket in self.buckets:
            bucket.wait()
            bucket.gradients.zero_()
        for parameter in self.named.values():
            parameter.grad = None


def _filled(members: Iterable[Member]) -> list[list[Member]]:
    """Buckets in the order in which backward completes them, which is about that of the parameters, reversed."""
    closed: list[list[tuple[int, Member]]] = []
    filling: dict[object, list[tuple[int, Member]]] = {}
    for entry in enumerate(reversed(list(members))):
        member = entry[1]
        kind = (member.rows.shape[1:], member.parameter.dtype, member.group)
        bucket = filling.setdefault(kind, [])
        bucket.append(entry)
        size = sum(other.parameter.nbytes for _, other in bucket)
        even = sum(len(other.rows) for _, other in bucket) % member.group.size() == 0
        if size >= BUCKET_BYTES and (even or size >= 4 * BUCKET_BYTES):
            closed.append(filling.pop(kind))
    closed += filling.values()
    return [[member for _, member in bucket] for bucket in sorted(closed, key=lambda bucket: bucket[-1][0])]

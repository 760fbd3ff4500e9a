"""Optimizer shards for parameters that FSDP2's `fully_shard` has split over ranks.

Stacks of matrices, and what AdamW steps, are split between matrices or rows: each rank steps its own. A single matrix
is split between its rows, and Muon needs all of them: the rank that owns the matrix receives the gradient's rows and
sends back those of the update. Muon on DTensors directly would all-gather every matrix on every rank and orthogonalize
it there, `world_size` times.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .optimizer_shards import Slice


class Shard(NamedTuple):
    """A parameter split along its first dimension. by_row: its optimizer steps each row independently."""

    name: str
    parameter: nn.Parameter  # a DTensor
    by_row: bool
    slice: Slice  # this rank's part of the full parameter
    group: dist.ProcessGroup  # the ranks it is split over

    @property
    def weight(self) -> Tensor:
        """This rank's rows, sharing memory with the parameter."""
        return _local(self.parameter.detach())

    def gradient(self) -> Tensor:
        """Returns the sum over ranks of this rank's rows; `fully_shard` leaves the mean."""
        assert self.parameter.grad is not None, f"{self.name} has no gradient"
        return _local(self.parameter.grad) * self.group.size()


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


class _Matrices:
    """Matrices of one shape; rank i % ranks owns the i-th.

    updates: (matrices, out, in), of those owned here. Optimizers step these zeros in place of the weights, so that
    afterwards they hold the update. with_weights: they read the weights, so these are gathered, too, and the steps
    taken from them.
    """

    def __init__(self, shards: list[Shard], with_weights: bool) -> None:
        self.shards = shards
        self.with_weights = with_weights
        self.group = shards[0].group
        self.rank, self.ranks = self.group.rank(), self.group.size()
        self.rows = _rows(shards[0].slice.shape[0], self.ranks)
        mine = len(shards[self.rank :: self.ranks])
        self.updates = shards[0].weight.new_zeros(mine, *shards[0].slice.shape)
        self.waiting: set[str] = set()  # matrices that this step has yet to update

    def by_owner(self) -> list[list[Shard]]:
        return [self.shards[rank :: self.ranks] for rank in range(self.ranks)]

    def gather(self) -> Tensor:
        """Returns the full gradients of the matrices owned here, (matrices, out, in)."""
        if self.with_weights:
            self.updates.copy_(self._gather(lambda shard: shard.weight))
        return self._gather(Shard.gradient)

    def _gather(self, part: Callable[[Shard], Tensor]) -> Tensor:
        """Returns full matrices from the part of each that every rank has."""
        own = self.rows[self.rank]
        sent = [torch.stack([part(shard) for shard in shards]) if shards else None for shards in self.by_owner()]
        columns = self.updates.shape[-1]
        sizes = [own * columns * len(shards) for shards in self.by_owner()]
        flat = torch.cat([part.flatten() for part in sent if part is not None])
        received = [rows * columns * len(self.updates) for rows in self.rows]
        parts = self._exchange(flat, sizes, received)
        return torch.cat(
            [part.view(len(self.updates), rows, columns) for part, rows in zip(parts, self.rows, strict=True)], 1
        )

    def scatter(self) -> None:
        """Add the rows of each update to the weights of the ranks that hold them."""
        columns = self.updates.shape[-1]
        parts = self.updates.split(self.rows, dim=1)
        own = self.rows[self.rank]
        received = [own * columns * len(shards) for shards in self.by_owner()]
        back = self._exchange(torch.cat([part.flatten() for part in parts]), [part.numel() for part in parts], received)
        for shards, part in zip(self.by_owner(), back, strict=True):
            for shard, update in zip(shards, part.view(len(shards), own, columns), strict=True):
                if self.with_weights:
                    shard.weight.copy_(update)
                else:
                    shard.weight.add_(update)
        self.updates.zero_()

    def _exchange(self, flat: Tensor, sent: list[int], received: list[int]) -> list[Tensor]:
        got = flat.new_empty(sum(received))
        dist.all_to_all_single(got, flat, received, sent, group=self.group)
        return list(got.split(received))


def _rows(count: int, ranks: int) -> list[int]:
    """Returns the rows of each rank as DTensor splits a dimension: equal chunks, the last ones smaller or empty."""
    most = -(-count // ranks)
    return [max(min(count - rank * most, most), 0) for rank in range(ranks)]


class FSDP:
    """Optimizer shards for ranks that each hold a part of every parameter.

    with_weights: an update of a matrix depends on its weights, not on its gradients alone.
    """

    def __init__(self, shards: Iterable[Shard], with_weights: bool = False) -> None:
        self._shards = {shard.name: shard for shard in shards}
        self.parameters: dict[str, Tensor] = {}
        self.slices: dict[str, Slice] = {}
        by_shape: dict[object, list[Shard]] = {}
        for name, shard in self._shards.items():
            if shard.by_row:
                self.parameters[name], self.slices[name] = shard.weight, shard.slice
            else:
                by_shape.setdefault((shard.slice.shape, shard.group), []).append(shard)
        self._matrices = [_Matrices(shards, with_weights) for shards in by_shape.values()]
        self._matrices_of: dict[str, _Matrices] = {}
        for matrices in self._matrices:
            for number, shard in enumerate(matrices.shards):
                owned = number % matrices.ranks == matrices.rank
                place = number // matrices.ranks
                self.parameters[shard.name] = matrices.updates[place : place + 1] if owned else matrices.updates[:0]
                self.slices[shard.name] = Slice(0, shard.slice.shape[0] if owned else 0, shard.slice.shape)
                self._matrices_of[shard.name] = matrices

    def owned_weights(self) -> dict[str, tuple[Tensor, Slice]]:
        return {name: (shard.weight, shard.slice) for name, shard in self._shards.items()}

    def begin_last_backward(self) -> None:
        pass

    def reduce_gradients(self) -> None:
        for name, shard in self._shards.items():
            if shard.by_row:
                self.parameters[name].grad = shard.gradient()
        for matrices in self._matrices:
            gradients = matrices.gather()
            matrices.waiting = {shard.name for shard in matrices.shards}
            for number, shard in enumerate(matrices.shards):
                place = number // matrices.ranks
                owned = number % matrices.ranks == matrices.rank
                self.parameters[shard.name].grad = gradients[place : place + 1] if owned else gradients[:0]

    @torch.no_grad()
    def gather_updated(self, names: Collection[str]) -> None:
        for name in names:
            matrices = self._matrices_of.get(name)
            if matrices is not None:
                matrices.waiting.discard(name)
                if not matrices.waiting:
                    matrices.scatter()

    def finish_step(self) -> None:
        for name, shard in self._shards.items():
            shard.parameter.grad = None
            self.parameters[name].grad = None

"""Optimizer shards for parameters that FSDP2's `fully_shard` has split over ranks.

Stacks of matrices are split between matrices, and AdamW's parameters between rows, so each rank can step its own part.
A single matrix is also split between rows, but Muon needs the whole matrix. The rank that owns the matrix therefore
gathers the rows of its gradient and sends back the rows of its update. If Muon were applied to DTensors directly, every
rank would all-gather and orthogonalize every matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .optimizer_shards import LocalParameter, OptimizerShards, Slice


def _weight(shard: LocalParameter) -> Tensor:
    """Return this rank's rows, which share memory with the parameter."""
    return _local(shard.parameter.detach())


def _gradient(shard: LocalParameter) -> Tensor:
    """Return this rank's rows of the gradient, summed over ranks. `fully_shard` computes the mean instead."""
    assert shard.parameter.grad is not None, f"{shard.name} has no gradient"
    return _local(shard.parameter.grad) * shard.group.size()


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


class _Matrices:
    """Matrices of the same shape. The i-th matrix is owned by rank i % ranks.

    updates: for the matrices that this rank owns, (matrices, out, in). Optimizers step these zeros instead of the
    weights, which turns them into the updates. If `with_weights` is set, optimizers step copies of the weights instead.
    """

    def __init__(self, shards: list[LocalParameter], with_weights: bool) -> None:
        self.shards = shards
        self.with_weights = with_weights
        self.group = shards[0].group
        self.rank, self.ranks = self.group.rank(), self.group.size()
        count, columns = shards[0].slice.shape
        most = -(-count // self.ranks)  # DTensor makes equal chunks, of which the last may be smaller or empty
        self.rows = [max(min(count - rank * most, most), 0) for rank in range(self.ranks)]  # of each rank
        self.by_owner = [shards[rank :: self.ranks] for rank in range(self.ranks)]
        self.updates = _weight(shards[0]).new_zeros(len(self.by_owner[self.rank]), count, columns)
        # Shapes of what is exchanged with each rank: our rows of its matrices, and its rows of our matrices.
        self._held = [torch.Size((len(its), self.rows[self.rank], columns)) for its in self.by_owner]
        self._owned = [torch.Size((len(self.updates), rows, columns)) for rows in self.rows]
        self.waiting: set[str] = set()  # matrices that have not been updated in this step yet

    def place(self, number: int) -> slice:
        """Return the position of matrix `number` in `updates`, or an empty slice if another rank owns it."""
        place = number // self.ranks
        return slice(place, place + (number % self.ranks == self.rank))

    def gather(self) -> Tensor:
        """Return the full gradients of the matrices that this rank owns, (matrices, out, in)."""
        if self.with_weights:
            self.updates.copy_(self._gather(_weight))
        return self._gather(_gradient)

    def _gather(self, part: Callable[[LocalParameter], Tensor]) -> Tensor:
        """Return the full matrices that this rank owns, assembled from the rows on every rank."""
        flat = torch.cat([part(shard).flatten() for shards in self.by_owner for shard in shards])
        return torch.cat(self._exchange(flat, self._held, self._owned), 1)

    def scatter(self) -> None:
        """Send the rows of each update to the ranks that hold them, and apply them to the weights there."""
        flat = torch.cat([part.flatten() for part in self.updates.split(self.rows, dim=1)])
        put = Tensor.copy_ if self.with_weights else Tensor.add_
        for shards, updates in zip(self.by_owner, self._exchange(flat, self._owned, self._held), strict=True):
            for shard, update in zip(shards, updates, strict=True):
                put(_weight(shard), update)
        self.updates.zero_()

    def _exchange(self, flat: Tensor, sent: list[torch.Size], received: list[torch.Size]) -> list[Tensor]:
        """Send a part of `flat` to each rank, and return the parts that the ranks send to this one, in rank order."""
        sizes = [shape.numel() for shape in received]
        got = flat.new_empty(sum(sizes))
        dist.all_to_all_single(got, flat, sizes, [shape.numel() for shape in sent], group=self.group)
        return [part.view(shape) for part, shape in zip(got.split(sizes), received, strict=True)]


class FSDP(OptimizerShards):
    """Optimizer shards for ranks that each hold a part of every parameter.

    with_weights: the updates of matrices depend not only on gradients but also on weights.
    """

    def __init__(self, shards: Iterable[LocalParameter], with_weights: bool = False) -> None:
        super().__init__({})
        self._shards = {shard.name: shard for shard in shards}
        by_shape: dict[object, list[LocalParameter]] = {}
        for name, shard in self._shards.items():
            if shard.by_row:
                self.parameters[name], self.slices[name] = _weight(shard), shard.slice
            else:
                by_shape.setdefault((shard.slice.shape, shard.group), []).append(shard)
        self._matrices = [_Matrices(shards, with_weights) for shards in by_shape.values()]
        self._matrices_of: dict[str, _Matrices] = {}
        for matrices in self._matrices:
            for number, shard in enumerate(matrices.shards):
                mine = matrices.updates[matrices.place(number)]
                self.parameters[shard.name] = mine
                self.slices[shard.name] = Slice(0, len(mine) * shard.slice.shape[0], shard.slice.shape)
                self._matrices_of[shard.name] = matrices

    def owned_weights(self) -> dict[str, tuple[Tensor, Slice]]:
        return {name: (_weight(shard), shard.slice) for name, shard in self._shards.items()}

    def reduce_gradients(self) -> None:
        for name, shard in self._shards.items():
            if shard.by_row:
                self.parameters[name].grad = _gradient(shard)
        for matrices in self._matrices:
            gradients = matrices.gather()
            matrices.waiting = {shard.name for shard in matrices.shards}
            for number, shard in enumerate(matrices.shards):
                self.parameters[shard.name].grad = gradients[matrices.place(number)]

    @torch.no_grad()
    def gather_updated(self, names: Collection[str]) -> None:
        for name in names:
            matrices = self._matrices_of.get(name)
            if matrices is not None:
                matrices.waiting.discard(name)
                if not matrices.waiting:
                    matrices.scatter()

    def finish_step(self) -> None:
        for shard in self._shards.values():
            shard.parameter.grad = None
        super().finish_step()

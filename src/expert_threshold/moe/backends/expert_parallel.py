"""Experts split over ranks: a token is sent once to every rank that owns some of its experts, which returns their sum.

This sends at most as many rows as sending one row per expert, and fewer if a token chose two experts on one rank
(`benchmarks/scaling.py` counts both). Gates are sent along with each row, so the owner returns one gate-weighted sum.
At inference, routing by cutoffs needs no communication, since it only uses a token's own scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...kernels import refuse_second_derivative
from ..experts import Experts
from .grouped import sum_rows

ABSENT = -math.inf
"""Marks the gate of an expert that the token did not choose. Other gates are finite."""


class OwnExperts(Experts):
    """This rank's shard of the experts in a layer, with the same parameter names.

    backend: the backend that computes the experts. group: the ranks that hold the shards.
    """

    def __init__(self, experts: Experts, backend: Callable[..., Tensor], group: dist.ProcessGroup) -> None:
        nn.Module.__init__(self)
        self.activation = experts.activation
        self.backend = backend
        self.group = group
        self.gate = None
        for name, weight in experts.named_parameters():
            setattr(self, name, nn.Parameter(part(weight.detach(), group).clone(), weight.requires_grad))
        self.train(experts.training)

    def forward(self, x: Tensor, gates: Tensor, assignment: Tensor) -> Tensor:
        """Return the weighted sum of outputs for each row, (rows, d_model). gates, assignment: (rows, own experts)."""
        y: Tensor = self.backend(x, gates, assignment, self, rows=None)
        return y


class Rows(NamedTuple):
    """The rows to send, ordered by rank, then token: a row is a token and a rank that owns some of its experts."""

    token: Tensor  # (rows,)
    rank: Tensor  # (rows,)
    by_token: Tensor  # (rows,) the rows, ordered by token
    of_token: Tensor  # (tokens,) where each token's rows start in `by_token`


class Splits(NamedTuple):
    """The numbers of rows that this rank sends to and receives from each rank."""

    sent: list[int]
    received: list[int]

    def back(self) -> Splits:
        """Return the splits of the reverse exchange."""
        return Splits(self.received, self.sent)


def expert_parallel_sum(x: Tensor, gates: Tensor, assignment: Tensor, experts: Experts, rows: int | None) -> Tensor:
    """Return the routed sum, to which every rank of the group contributes the part of its own experts."""
    assert isinstance(experts, OwnExperts)
    group = experts.group
    chosen = assignment.unflatten(1, (dist.get_world_size(group), -1)).any(2)
    sent, splits = by_count(chosen, group)
    by_rank = gates.where(assignment, ABSENT).unflatten(1, (dist.get_world_size(group), -1))
    there, there_gates = _Send.apply(x, by_rank, group, splits, *sent)
    y: Tensor = _Combine.apply(experts(there, there_gates, there_gates != ABSENT), len(x), group, splits, *sent)
    return y


def by_count(chosen: Tensor, group: dist.ProcessGroup) -> tuple[Rows, Splits]:
    """Return the rows for chosen (tokens, ranks), and the splits, which ranks exchange. Waits for the device."""
    rank, token = chosen.T.nonzero().unbind(1)
    counts = chosen.sum(0)
    incoming = torch.empty_like(counts)
    dist.all_to_all_single(incoming, counts, group=group)
    sent, received = torch.stack((counts, incoming)).tolist()
    there = chosen.sum(1)
    rows = Rows(token, rank, token.argsort(stable=True), there.cumsum(0) - there)
    return rows, Splits(sent, received)


def _exchange(rows: Tensor, splits: Splits, group: dist.ProcessGroup) -> Tensor:
    """Exchange rows (rows, width), which are ordered by rank, in one all-to-all."""
    received = rows.new_empty(sum(splits.received), rows.shape[1])
    dist.all_to_all_single(received, rows.contiguous(), splits.received, splits.sent, group=group)
    return received


def _join(rows: Tensor, gates: Tensor) -> Tensor:
    """Append each row's gates, bit for bit, so that both are sent in one message."""
    wide = gates.to(torch.promote_types(gates.dtype, rows.dtype))
    return torch.cat((rows, wide.contiguous().view(rows.dtype)), 1)


def _part(joined: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split joined rows into rows of width `width` and their gates."""
    rows, gates = joined[:, :width].contiguous(), joined[:, width:].contiguous()
    return rows, gates.view(torch.promote_types(dtype, rows.dtype)).to(dtype)


class _Send(torch.autograd.Function):
    """Sends rows of x (tokens, d_model) and of gates (tokens, ranks, experts per rank) to the owners; backward returns
    their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gates: Tensor, group: dist.ProcessGroup, splits: Splits, *rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        token, rank, *_ = rows
        ctx.save_for_backward(*rows)
        ctx.group, ctx.splits, ctx.gates = group, splits, (gates.shape, gates.dtype)
        joined = _join(x.index_select(0, token), gates[token, rank])
        return _part(_exchange(joined, splits, group), x.shape[1], gates.dtype)

    @staticmethod
    def backward(ctx: Any, drows: Tensor, dgates: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        token, rank, by_token, of_token = ctx.saved_tensors
        shape, dtype = ctx.gates
        joined = _exchange(_join(drows, dgates), ctx.splits.back(), ctx.group)
        dx_rows, dgate_rows = _part(joined, drows.shape[1], dtype)
        dgates = dgate_rows.new_zeros(shape)
        dgates[token, rank] = dgate_rows
        return sum_rows(dx_rows, by_token, of_token), dgates, None, None, None, None, None, None


class _Combine(torch.autograd.Function):
    """Receives rows (rows, d_model) from the owners and sums them by token; backward sends gradients the other way."""

    @staticmethod
    def forward(
        ctx: Any, there: Tensor, tokens: int, group: dist.ProcessGroup, splits: Splits, *rows: Tensor
    ) -> Tensor:
        token, _, by_token, of_token = rows
        assert tokens == len(of_token)
        ctx.save_for_backward(token)
        ctx.group, ctx.splits = group, splits
        return sum_rows(_exchange(there, splits.back(), group), by_token, of_token)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        (token,) = ctx.saved_tensors
        return _exchange(dy.index_select(0, token), ctx.splits, ctx.group), *[None] * 7


def part(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a view of this rank's rows of a tensor (experts, …)."""
    return tensor.chunk(dist.get_world_size(group))[dist.get_rank(group)]

"""Experts split over ranks: a token goes once to every rank that has some of its experts, and their sum comes back.

A row per rank and not per expert: never more rows, and fewer wherever a token chose two experts of one rank
(`benchmarks/scaling.py` counts both). Its gates travel with it, so the owner returns one gate-weighted sum.
Routing itself needs no communication in inference, since a cutoff is compared with the token's own score.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...kernels.autograd import refuse_second_derivative
from ...routing import Rule
from ..experts import Experts
from ..layer import MoE
from . import Dispatch
from .grouped import sum_rows

ABSENT = -math.inf
"""In place of the gate of an expert that the token did not choose; gates are finite."""


def shard_experts(module: nn.Module, group: dist.ProcessGroup, *, micro_batch: tuple[int, int] | None = None) -> None:
    """Leave this rank its part of the experts of every MoE layer in `module`, and send tokens to the others' owners.

    Call it on all ranks of the group, with equal weights, before optimizers are made. Every rank goes on with its own
    tokens, as many as it likes; forward and backward must be called on all ranks of the group alike. Afterwards the
    gradient of an expert is the sum over the group's ranks, whole at its owner: where a loss is the mean over W ranks,
    other parameters' gradients are averaged over the W, experts' summed over the ranks that hold the same experts
    and divided by W.

    micro_batch: sequences and their length, equal on all ranks. In training the splits then are equal, padded to the
    capacity bound, and their sizes are not communicated or waited for. That is possible where the rule bounds what one
    rank sends to an expert: see `split_rows`. None: uneven splits, their sizes sent first, as in inference always.

    Raises ValueError, on all ranks, if the experts do not divide by the ranks, or if equal splits are not possible.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, MoE)]
    ranks = dist.get_world_size(group)
    for layer in layers:
        require_even_split(layer.router.rule.num_experts, ranks)
        if isinstance(layer.dispatch, ExpertParallel):
            raise ValueError("experts are split already; call shard_experts once")
    if micro_batch is not None:
        _require_same(micro_batch, group, layers[0].router.weight.device if layers else None)
    splits = [None if micro_batch is None else split_rows(layer.router.rule, micro_batch, ranks) for layer in layers]
    for layer, rows in zip(layers, splits, strict=True):
        layer.experts = OwnExperts(layer.experts, layer.dispatch, group)
        tokens = None if micro_batch is None else micro_batch[0] * micro_batch[1]
        layer.dispatch = ExpertParallel(group, rows, tokens)


def require_even_split(num_experts: int, ranks: int) -> None:
    """Raises ValueError unless every rank gets as many experts."""
    if num_experts % ranks:
        raise ValueError(
            f"num_experts={num_experts} cannot be split over {ranks} ranks; use a number of ranks that divides it"
        )


def split_rows(rule: Rule, micro_batch: tuple[int, int], ranks: int) -> int:
    """Return the rows that one rank sends to another at most, in training on so many sequences of such a length.

    They are those of the experts there, each of which gets at most `rule.max_load` of this rank's tokens, and no more
    than there are tokens. A global pool bounds what an owner receives from all ranks together, not from one; token
    choice and thresholds without bounds bound nothing.

    Raises ValueError where there is no bound.
    """
    tokens = micro_batch[0] * micro_batch[1]
    load = rule.max_load(tokens, training=True, ranks=ranks)
    if load is None:
        raise ValueError(
            f"rule={rule!r} bounds no expert's load from one rank, so equal splits could overflow; use splits by "
            "count, or a rule with pools of one rank and capacity bounds"
        )
    return min(rule.num_experts // ranks * load, tokens)


def _require_same(micro_batch: tuple[int, int], group: dist.ProcessGroup, device: torch.device | None) -> None:
    mine = torch.tensor(micro_batch, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    if any(not torch.equal(mine, other) for other in everyone):
        sizes = ", ".join(" × ".join(map(str, other.tolist())) for other in everyone)
        raise ValueError(f"micro_batch differs between ranks: {sizes}; give one size, or use splits by count")


class OwnExperts(Experts):
    """This rank's part of a layer's experts, under the same names. dispatch: what computes them."""

    def __init__(self, experts: Experts, dispatch: Dispatch, group: dist.ProcessGroup) -> None:
        nn.Module.__init__(self)
        self.activation = experts.activation
        self.dispatch = dispatch
        self.group = group
        self.gate = None
        for name, weight in experts.named_parameters():
            setattr(self, name, nn.Parameter(part(weight.detach(), group).clone(), weight.requires_grad))
        self.train(experts.training)

    def forward(self, x: Tensor, gates: Tensor, assignment: Tensor) -> Tensor:
        """The weighted sums of rows (rows, d_model) over these experts; gates and assignment: (rows, own experts)."""
        return self.dispatch(x, gates, assignment, self)


class Rows(NamedTuple):
    """What travels: a row is a token and a rank that has some of its experts; ordered by rank, then token."""

    token: Tensor  # (rows,)
    rank: Tensor  # (rows,)
    by_token: Tensor  # (rows,) the rows, ordered by token
    of_token: Tensor  # (tokens,) where in `by_token` the rows of each token begin


class Splits(NamedTuple):
    """Rows that this rank sends to each rank and gets from each; None: all as many."""

    sent: list[int] | None
    received: list[int] | None

    def back(self) -> Splits:
        """The way back."""
        return Splits(self.received, self.sent)


class ExpertParallel:
    """A layer's dispatch once its experts are split over `group`; made by `shard_experts`.

    rows: of every split in training, on exactly `tokens` tokens; None of both: splits as they come.
    """

    def __init__(self, group: dist.ProcessGroup, rows: int | None, tokens: int | None) -> None:
        self.group = group
        self.rows = rows
        self.tokens = tokens

    def __call__(
        self, x: Tensor, gates: Tensor, assignment: Tensor, experts: Experts, rows: int | None = None
    ) -> Tensor:
        """Equals `reference` of all experts; arguments as there, but that `experts` are this rank's own."""
        ranks = dist.get_world_size(self.group)
        chosen = assignment.unflatten(1, (ranks, -1)).any(2)
        sent, splits = self._plan(chosen, padded=experts.training and self.rows is not None)
        by_rank = gates.where(assignment, ABSENT).unflatten(1, (ranks, -1))
        there, there_gates = _Send.apply(x, by_rank, self.group, splits, *sent)
        y: Tensor = _Combine.apply(
            experts(there, there_gates, there_gates != ABSENT), len(x), self.group, splits, *sent
        )
        return y

    def _plan(self, chosen: Tensor, padded: bool) -> tuple[Rows, Splits]:
        if not padded:
            return by_count(chosen, self.group)
        assert self.rows is not None
        if len(chosen) != self.tokens:
            raise ValueError(
                f"batch of {len(chosen)} tokens, but splits were made for {self.tokens}; train on batches of that "
                "size or use splits by count"
            )
        return equal(chosen, self.rows), Splits(None, None)


def by_count(chosen: Tensor, group: dist.ProcessGroup) -> tuple[Rows, Splits]:
    """The rows of chosen (tokens, ranks), and the splits, which are communicated. Waits for the device."""
    rank, token = chosen.T.nonzero().unbind(1)
    counts = chosen.sum(0)
    incoming = torch.empty_like(counts)
    dist.all_to_all_single(incoming, counts, group=group)
    sent, received = torch.stack((counts, incoming)).tolist()
    there = chosen.sum(1)
    rows = Rows(token, rank, token.argsort(stable=True), there.cumsum(0) - there)
    return rows, Splits(sent, received)


def equal(chosen: Tensor, length: int) -> Rows:
    """So many rows for each rank: first those of chosen (tokens, ranks), then others', which are sent to no expert.

    Every shape follows from the arguments' shapes, so nothing waits for the device.
    """
    tokens, ranks = chosen.shape
    torch._assert_async((chosen.sum(0) <= length).all(), f"a rank is sent more than {length} rows")
    token = (~chosen).byte().argsort(dim=0, stable=True)[:length].T.flatten()
    rank = torch.arange(ranks, device=token.device).repeat_interleave(length, output_size=len(token))
    ordered, by_token = token.sort(stable=True)
    return Rows(token, rank, by_token, torch.searchsorted(ordered, torch.arange(tokens, device=token.device)))


def _exchange(rows: Tensor, splits: Splits, group: dist.ProcessGroup) -> Tensor:
    """One all-to-all of rows (rows, width), ordered by rank."""
    received = rows.new_empty(len(rows) if splits.received is None else sum(splits.received), rows.shape[1])
    dist.all_to_all_single(received, rows.contiguous(), splits.received, splits.sent, group=group)
    return received


def _join(rows: Tensor, gates: Tensor) -> Tensor:
    """Rows with their gates at the end, bit by bit, so that both travel together."""
    wide = gates.to(torch.promote_types(gates.dtype, rows.dtype))
    return torch.cat((rows, wide.contiguous().view(rows.dtype)), 1)


def _part(joined: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of such a width, and their gates."""
    rows, gates = joined[:, :width].contiguous(), joined[:, width:].contiguous()
    return rows, gates.view(torch.promote_types(dtype, rows.dtype)).to(dtype)


class _Send(torch.autograd.Function):
    """Rows of x (tokens, d_model) and of gates (tokens, ranks, experts of one) at the owners; gradients come back."""

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
    """The sums of rows (rows, d_model) of the owners, back at their tokens (tokens, d_model); its mirror backward."""

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


def expert_parameters(module: nn.Module) -> dict[str, dist.ProcessGroup]:
    """The parameters of split experts by name, each with the group that it is split over."""
    return {
        f"{path}.{name}".removeprefix("."): own.group
        for path, own in module.named_modules()
        if isinstance(own, OwnExperts)
        for name, _ in own.named_parameters()
    }


def part(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's rows of a tensor (experts, …); a view."""
    return tensor.chunk(dist.get_world_size(group))[dist.get_rank(group)]

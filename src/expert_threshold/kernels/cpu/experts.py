"""A routed sum of relu² experts by `experts.cpp`; a feed-forward is one expert that takes every token.

Blocks of rows are gathered, multiplied, squared and multiplied again while they are in a core's cache. Only the
arguments and the pre-activations are saved for backward. Each half is one operation to torch's tracer.
"""

from __future__ import annotations

from ctypes import CDLL, c_bool, c_int64
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd import refuse_second_derivative
from ..planned import loads_of, on_cpu
from ..scratch import scratch
from . import FEWEST_ROWS, TILE, address, available, library

MOST_WEIGHTS = 1 << 23  # in a matrix; each thread has room for two
INT32 = 4  # bytes
EXACT, NONE = -1, 0  # rows of pre-activations to allocate: as many as needed, or none


def computes(x: Tensor, hidden: int, activation: str) -> bool:
    """Return True if the kernels can compute rows like x (…, d_model)."""
    width = x.shape[-1]
    tiles = width % TILE == 0 == hidden % TILE and width * hidden <= MOST_WEIGHTS
    return tiles and activation == "relu2" and on_cpu(x) and x.dtype == torch.bfloat16 and available()


def applies(x: Tensor, hidden: int, activation: str) -> bool:
    """Return True if the kernels can compute rows like x (…, d_model) and there are enough rows to pay off."""
    return x.numel() // max(x.shape[-1], 1) >= FEWEST_ROWS and computes(x, hidden, activation)


def routed_sum(
    x: Tensor,
    gates: Tensor,
    assignment: Tensor,
    experts: tuple[Tensor, Tensor],
    shared: tuple[Tensor, Tensor] | None = None,
    rows: int | None = None,
) -> Tensor:
    """Return y_t = shared(x_t) + Σ_e z[t,e] g[t,e] down_e · relu(up_e x_t)² of x (tokens, d_model).

    experts: up (experts, d_expert, d_model) and down (experts, d_model, d_expert); shared: a single expert's matrices;
    all in bfloat16, like x. gates, assignment: (tokens, experts), float32 and bool. rows: a bound on the assigned
    pairs; None if unknown.
    """
    alone = () if shared is None else (weight[None] for weight in shared)
    return _sum(x, gates, assignment, *experts, *alone, rows=assignment.numel() if rows is None else rows)


def feed_forward(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return down · relu(up · x)² of x (tokens, d_model) and matrices (out, in), all in bfloat16."""
    return _sum(x, None, None, up[None], down[None], rows=len(x))


def _sum(x: Tensor, gates: Tensor | None, assignment: Tensor | None, *weights: Tensor, rows: int) -> Tensor:
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, gates, *weights))
    room = (rows if torch.compiler.is_compiling() else EXACT) if wanted else NONE
    y: Tensor = _Experts.apply(room, x, gates, assignment, *weights)
    return y


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, room: int, x: Tensor, gates: Tensor | None, assignment: Tensor | None, *weights: Tensor
    ) -> Tensor:
        y: Tensor
        y, *kept = _forward(x, gates, assignment, list(weights), room)
        ctx.save_for_backward(x, gates, assignment, *weights, *kept)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        x, gates, assignment, *rest = ctx.saved_tensors
        weights, kept = rest[: 2 * len(rest) // 3], rest[2 * len(rest) // 3 :]
        dx, *others = _backward(dy, x, gates, assignment, weights, kept)
        if gates is None:
            return None, dx, None, None, *others
        return None, dx, others[0], None, *others[1:]


class _Order(NamedTuple):
    """Pairs of a token and one of its experts, by expert, then token; None: a single expert takes every token."""

    first: Tensor  # (experts + 1,) int64, where each expert's rows begin
    token: Tensor | None = None  # (pairs,) int32
    begin: Tensor | None = None  # (tokens + 1,) int32, where each token's rows begin in `slot`
    slot: Tensor | None = None  # (pairs,) int32, the rows of each token

    @classmethod
    def of(cls, kernels: CDLL, assignment: Tensor | None, tokens: int) -> _Order:
        if assignment is None:
            return cls(torch.tensor([0, tokens], device="cpu"))
        assignment = assignment.bool().contiguous()
        what = address(assignment), *map(c_int64, assignment.shape)
        first = assignment.new_empty(assignment.shape[1] + 1, dtype=torch.int64)
        kernels.et_count(*what, address(first))
        token, begin, slot = (
            first.new_empty(n, dtype=torch.int32) for n in (int(first[-1]), tokens + 1, int(first[-1]))
        )
        kernels.et_order(*what, *map(address, (first, token, begin, slot)))
        return cls(first, token, begin, slot)


class _Part(NamedTuple):
    """One term of the sum, routed or shared experts: the arguments common to both halves."""

    order: _Order
    pairs: int
    tensors: list[Tensor | None]  # x, gates, up, down
    sizes: list[c_int64]  # tokens, experts, d_model, d_expert
    add: c_bool  # to the output of earlier parts

    @property
    def arguments(self) -> list[Any]:
        return [*map(address, (*self.tensors, *self.order)), *self.sizes, self.add]

    def rows_of(self, y: Tensor) -> Tensor:
        """Return a buffer for the rows that are summed into y, or y itself if every row is a token."""
        return y if self.order.token is None else y.new_empty(self.pairs, y.shape[1])


def _parts(
    kernels: CDLL, x: Tensor, gates: Tensor | None, assignment: Tensor | None, weights: list[Tensor]
) -> list[_Part]:
    """Return the parts in the order of computation: shared experts first, then routed ones, which add to them."""
    parts = []
    routings = [(gates, assignment), (None, None)]
    for i, (gate, assigned) in zip(range(0, len(weights), 2), routings, strict=False):
        given = (x, None if gate is None else gate.float(), *weights[i : i + 2])
        tensors = [None if tensor is None else tensor.contiguous() for tensor in given]
        order = _Order.of(kernels, assigned, len(x))
        sizes = [c_int64(n) for n in (len(x), len(weights[i]), x.shape[1], weights[i].shape[1])]
        parts.append(_Part(order, int(order.first[-1]), tensors, sizes, c_bool(i == 0 and len(weights) > 2)))
    return parts


@torch.library.custom_op("expert_threshold::experts_forward", mutates_args=())
def _forward(
    x: Tensor, gates: Tensor | None, assignment: Tensor | None, weights: list[Tensor], room: int
) -> list[Tensor]:
    """Return y and, for each part, relu of the pre-activations (rows, d_expert), filled from the first row on.

    room: rows for routed pairs; shared experts have one row per token.
    """
    kernels = library()
    assert kernels is not None
    y, kept = x.new_empty(x.shape), []
    for part in reversed(_parts(kernels, x, gates, assignment, weights)):
        routed = part.order.token is not None
        if routed and room not in (EXACT, NONE) and part.pairs > room:
            raise RuntimeError(f"{part.pairs} pairs of tokens and experts do not fit into {room} rows")
        rows = 0 if room == NONE else room if routed and room != EXACT else part.pairs
        kept.append(x.new_empty(rows, part.sizes[3].value))
        kernels.et_forward(*part.arguments, *map(address, (kept[-1], part.rows_of(y), y)))
    return [y, *reversed(kept)]


@_forward.register_fake
def _(x: Tensor, gates: Tensor | None, assignment: Tensor | None, weights: list[Tensor], room: int) -> list[Tensor]:
    rows = [len(x)] * (len(weights) // 2) if room != NONE else [0] * (len(weights) // 2)
    if assignment is not None:
        rows[0] = sum(loads_of(assignment)) if room == EXACT else room
    return [x.new_empty(x.shape), *(x.new_empty(n, up.shape[1]) for n, up in zip(rows, weights[::2], strict=True))]


@scratch("expert_threshold::experts_forward")
def _(x: Tensor, gates: Tensor | None, assignment: Tensor | None, weights: list[Tensor], room: int) -> int:
    return 0 if assignment is None else sum(loads_of(assignment)) * (x.shape[1] * x.itemsize + 2 * INT32)


@torch.library.custom_op("expert_threshold::experts_backward", mutates_args=())
def _backward(
    dy: Tensor,
    x: Tensor,
    gates: Tensor | None,
    assignment: Tensor | None,
    weights: list[Tensor],
    kept: list[Tensor],
) -> list[Tensor]:
    """Return the gradients of x, of gates if there are any, and of weights."""
    kernels = library()
    assert kernels is not None
    dy, dx = dy.contiguous(), x.new_empty(x.shape)
    dgates = None if gates is None else gates.new_zeros(gates.shape, dtype=torch.float32)
    dweights = [weight.new_empty(weight.shape) for weight in weights]
    for i, part in reversed([*enumerate(_parts(kernels, x, gates, assignment, weights))]):
        padded = kernels.et_padded(address(part.order.first), part.sizes[1])
        width, hidden = (size.value for size in part.sizes[2:])
        room = [x.new_empty(padded, columns) for columns in (hidden, hidden, width, width)]
        found = (dx, dgates if i == 0 else None, *dweights[2 * i : 2 * i + 2])
        kernels.et_backward(address(dy), *part.arguments, *map(address, (kept[i], *room, part.rows_of(dx), *found)))
    return [dx, *([] if dgates is None or gates is None else [dgates.to(gates.dtype)]), *dweights]


@_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    gates: Tensor | None,
    assignment: Tensor | None,
    weights: list[Tensor],
    kept: list[Tensor],
) -> list[Tensor]:
    given = [x, *([] if gates is None else [gates]), *weights]
    return [tensor.new_empty(tensor.shape) for tensor in given]


@scratch("expert_threshold::experts_backward")
def _(
    dy: Tensor,
    x: Tensor,
    gates: Tensor | None,
    assignment: Tensor | None,
    weights: list[Tensor],
    kept: list[Tensor],
) -> int:
    """Return the bytes of all parts' orders and rooms: a part's room is freed when the next one's is there."""
    width, bytes_ = x.shape[1], 0
    for up, assigned in zip(weights[::2], (assignment, None), strict=False):
        loads = [len(x)] if assigned is None else loads_of(assigned)
        padded = sum(-(-load // TILE) * TILE for load in loads)
        bytes_ += 2 * padded * (up.shape[1] + width) * x.itemsize
        bytes_ += 0 if assigned is None else sum(loads) * (width * x.itemsize + 2 * INT32)
    return bytes_

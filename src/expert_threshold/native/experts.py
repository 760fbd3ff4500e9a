"""A routed sum of relu² experts by `experts.cpp`, and the feed-forward as one expert that every token goes to.

Blocks of rows are gathered, multiplied, squared and multiplied again while they are in a core's cache. Only the input,
the pre-activations and what was given are kept for backward. For torch's tracer each half is one operation.
"""

from __future__ import annotations

from ctypes import CDLL, c_int64
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd import refuse_second_derivative
from . import address, available, library

TILE = 32  # widths must be whole tiles
BLOCK = 256  # rows, as in experts.cpp
FEWEST_ROWS = 64  # with fewer, packing the weights costs more than it saves
EXACT, NONE = -1, 0  # how many rows of pre-activations to have room for: those there are, or none


def applies(x: Tensor, hidden: int, activation: str) -> bool:
    """Whether the kernels compute rows like x (…, d_model)."""
    rows, width = x.numel() // max(x.shape[-1], 1), x.shape[-1]
    fits = rows >= FEWEST_ROWS and width % TILE == 0 == hidden % TILE and activation == "relu2"
    return fits and x.is_cpu and x.dtype == torch.bfloat16 and available()


def routed_sum(
    x: Tensor, gates: Tensor, assignment: Tensor, up: Tensor, down: Tensor, rows: int | None = None
) -> Tensor:
    """y_t = Σ_e z[t,e] g[t,e] down_e · relu(up_e x_t)² of x (tokens, d_model).

    x, up (experts, d_expert, d_model), down, its mirror: bfloat16. gates, assignment: (tokens, experts), float32 and
    bool. rows: at least as many as pairs are assigned; None is not known.
    """
    return _sum(x, gates, assignment, up, down, assignment.numel() if rows is None else rows)


def feed_forward(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """down · relu(up · x)² of x (tokens, d_model) and matrices (out, in), all in bfloat16."""
    return _sum(x, None, None, up[None], down[None], len(x))


def _sum(x: Tensor, gates: Tensor | None, assignment: Tensor | None, up: Tensor, down: Tensor, rows: int) -> Tensor:
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, gates, up, down))
    room = (rows if torch.compiler.is_compiling() else EXACT) if wanted else NONE
    y: Tensor = _Experts.apply(x, gates, assignment, up, down, room)
    return y


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gates: Tensor | None, assignment: Tensor | None, up: Tensor, down: Tensor, room: int
    ) -> Tensor:
        y: Tensor
        y, kept = _forward(x, gates, assignment, up, down, room)
        ctx.save_for_backward(x, gates, assignment, up, down, kept)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        _, gates, *_ = ctx.saved_tensors
        dx, dgates, dup, ddown = _backward(dy, *ctx.saved_tensors)
        return dx, None if gates is None else dgates, None, dup, ddown, None


class _Order(NamedTuple):
    """Pairs of a token and one of its experts, ordered by expert, then token; None: every token at one expert."""

    first: Tensor  # (experts + 1,) int64, where each expert's rows begin
    token: Tensor | None = None  # (pairs,) int32
    begin: Tensor | None = None  # (tokens + 1,) int32, where in `slot` those of each token begin
    slot: Tensor | None = None  # (pairs,) int32, the rows of each token

    @classmethod
    def of(cls, kernels: CDLL, assignment: Tensor | None, tokens: int) -> _Order:
        if assignment is None:
            return cls(torch.tensor([0, tokens]))
        assignment = assignment.contiguous()
        what = address(assignment), *map(c_int64, assignment.shape)
        first = torch.empty(assignment.shape[1] + 1, dtype=torch.int64)
        kernels.et_count(*what, address(first))
        token, begin, slot = (torch.empty(n, dtype=torch.int32) for n in (int(first[-1]), tokens + 1, int(first[-1])))
        kernels.et_order(*what, *map(address, (first, token, begin, slot)))
        return cls(first, token, begin, slot)


def _prepare(
    x: Tensor, gates: Tensor | None, assignment: Tensor | None, up: Tensor, down: Tensor
) -> tuple[CDLL, _Order, list[Tensor | None], list[c_int64]]:
    """The kernels, the order of pairs, and what both halves are given; sizes: tokens, experts, d_model, d_expert."""
    kernels = library()
    assert kernels is not None
    given = [x, None if gates is None else gates.float(), up, down]
    sizes = [c_int64(n) for n in (len(x), len(up), x.shape[1], up.shape[1])]
    order = _Order.of(kernels, assignment, len(x))
    return kernels, order, [None if t is None else t.contiguous() for t in given], sizes


@torch.library.custom_op("expert_threshold::experts_forward", mutates_args=())
def _forward(
    x: Tensor, gates: Tensor | None, assignment: Tensor | None, up: Tensor, down: Tensor, room: int
) -> tuple[Tensor, Tensor]:
    """y and relu of the pre-activations, (room, d_expert), of which as many rows as there are pairs are filled."""
    kernels, order, given, sizes = _prepare(x, gates, assignment, up, down)
    pairs = int(order.first[-1])
    if room not in (EXACT, NONE) and pairs > room:
        raise RuntimeError(f"{pairs} pairs of tokens and experts do not fit into {room} rows")
    kept = x.new_empty(pairs if room == EXACT else room, up.shape[1])
    y = torch.empty(x.shape, dtype=x.dtype)
    ys = y if order.token is None else x.new_empty(pairs, x.shape[1])
    kernels.et_forward(
        *map(address, (*given, *order)), *sizes, address(kept if len(kept) else None), *map(address, (ys, y))
    )
    return y, kept


@_forward.register_fake
def _(
    x: Tensor, gates: Tensor | None, assignment: Tensor | None, up: Tensor, down: Tensor, room: int
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(room, up.shape[1])


@torch.library.custom_op("expert_threshold::experts_backward", mutates_args=())
def _backward(
    dy: Tensor, x: Tensor, gates: Tensor | None, assignment: Tensor | None, up: Tensor, down: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, gates (empty where there are none), up and down."""
    kernels, order, given, sizes = _prepare(x, gates, assignment, up, down)
    pairs, (hidden, width) = int(order.first[-1]), up.shape[1:]
    padded = pairs + TILE * int((order.first.diff() // BLOCK + 1).sum())
    dx, dup, ddown = (torch.empty(t.shape, dtype=t.dtype) for t in (x, up, down))
    dgates = torch.zeros(0 if gates is None else gates.shape, dtype=torch.float32)
    dxs = dx if order.token is None else x.new_empty(pairs, width)
    room = [x.new_empty(padded, columns) for columns in (hidden, hidden, width, width)]
    grads = map(address, (dx, dgates, dup, ddown))
    kernels.et_backward(
        *map(address, (dy.contiguous(), *given, *order)), *sizes, *map(address, (kept, *room, dxs)), *grads
    )
    return dx, dgates if gates is None else dgates.to(gates.dtype), dup, ddown


@_backward.register_fake
def _(
    dy: Tensor, x: Tensor, gates: Tensor | None, assignment: Tensor | None, up: Tensor, down: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dgates = x.new_empty(0, dtype=torch.float32) if gates is None else gates.new_empty(gates.shape)
    return x.new_empty(x.shape), dgates, up.new_empty(up.shape), down.new_empty(down.shape)

"""A routed sum of relu² experts by `experts.cpp`; a feed-forward is one expert that takes every token.

Blocks of rows are gathered, multiplied, squared and multiplied again while they are in a core's cache. Only the
arguments and the pre-activations are saved for backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..autograd import refuse_second_derivative
from ..operator import operator
from . import FEWEST_ROWS, TILE, available

MOST_WEIGHTS = 1 << 23  # in a matrix; each thread has room for two
EXACT, NONE = -1, 0  # rows of pre-activations to allocate: as many as needed, or none; as in experts.cpp


def computes(x: Tensor, hidden: int, activation: str) -> bool:
    """Return True if the kernels can compute rows like x (…, d_model)."""
    width = x.shape[-1]
    tiles = width % TILE == 0 == hidden % TILE and width * hidden <= MOST_WEIGHTS
    return tiles and activation == "relu2" and x.is_cpu and x.dtype == torch.bfloat16 and available()


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
        y, *kept = experts_forward(x, gates, assignment, list(weights), room)
        ctx.save_for_backward(x, gates, assignment, *weights, *kept)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        x, gates, assignment, *rest = ctx.saved_tensors
        weights, kept = rest[: 2 * len(rest) // 3], rest[2 * len(rest) // 3 :]
        dx, *others = experts_backward(dy, x, gates, assignment, weights, kept)
        if gates is None:
            return None, dx, None, None, *others
        return None, dx, others[0], None, *others[1:]


@operator()
def experts_forward(
    x: Tensor, gates: Tensor | None, assignment: Tensor | None, weights: list[Tensor], room: int
) -> list[Tensor]:
    """Return y and, for each term, relu of the pre-activations (rows, d_expert), filled from the first row on.

    weights: up and down of routed experts, then of a shared one; without an assignment of the latter alone.
    room: rows for routed pairs, EXACT or NONE; shared experts have one row per token.
    """
    rows = [len(x)] * (len(weights) // 2) if room != NONE else [0] * (len(weights) // 2)
    if assignment is not None:
        rows[0] = room  # while a compiler traces, never EXACT
    return [x.new_empty(x.shape), *(x.new_empty(n, up.shape[1]) for n, up in zip(rows, weights[::2], strict=True))]


@operator()
def experts_backward(
    dy: Tensor,
    x: Tensor,
    gates: Tensor | None,
    assignment: Tensor | None,
    weights: list[Tensor],
    kept: list[Tensor],
) -> list[Tensor]:
    """Return the gradients of x, of gates if there are any, and of weights."""
    return [t.new_empty(t.shape) for t in (x, gates, *weights) if t is not None]

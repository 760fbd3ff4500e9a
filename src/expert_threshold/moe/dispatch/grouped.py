"""Every expert's tokens as one segment: gather, two products, gate-weighted scatter.

Only the input, the pre-activations and the indices are kept for backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..experts import Activation, Experts, refuse_second_derivative, up_project


def grouped(x: Tensor, gates: Tensor, assignment: Tensor, experts: Experts) -> Tensor:
    """Equals `reference`; arguments as there. Segments may have any length, none included."""
    y: Tensor = _Grouped.apply(
        x, gates, assignment, experts.activation, experts.down.to(x.dtype), *experts.ups(x.dtype)
    )
    return y


def pack(assignment: Tensor) -> tuple[Tensor, list[int]]:
    """Token indices sorted by expert, then token, and how many each expert has. assignment: (tokens, experts)."""
    return assignment.T.nonzero()[:, 1], assignment.sum(0).tolist()


class _Grouped(torch.autograd.Function):
    """The segments one after the other, so that each one's intermediates stay in cache."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gates: Tensor, assignment: Tensor, activation: Activation, down: Tensor, *ups: Tensor
    ) -> Tensor:
        tokens, loads = pack(assignment)
        y = torch.zeros_like(x)
        kept = []
        for i, rows in enumerate(tokens.split(loads)):
            if not loads[i]:  # a decoded token goes to few experts: the others must cost nothing
                kept.append(x.new_empty(0, activation.width * down.shape[2]))
                continue
            keep, a = activation.forward(up_project(x.index_select(0, rows), tuple(up[i] for up in ups)))
            y.index_add_(0, rows, (a @ down[i].T).mul_(gates[:, i].index_select(0, rows)[:, None]))
            kept.append(keep)
        ctx.activation, ctx.loads = activation, loads
        ctx.save_for_backward(x, gates, tokens, down, *ups, *kept)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        x, gates, tokens, down, *rest = ctx.saved_tensors
        activation: Activation = ctx.activation
        ups, kept = rest[: activation.width], rest[activation.width :]
        dx, dgates, ddown = torch.zeros_like(x), torch.zeros_like(gates), torch.empty_like(down)
        dups = [torch.empty_like(up) for up in ups]
        for i, (rows, keep) in enumerate(zip(tokens.split(ctx.loads), kept, strict=True)):
            xs, dys = x.index_select(0, rows), dy.index_select(0, rows)
            gate = gates[:, i].index_select(0, rows)[:, None].to(x.dtype)
            dout = dys @ down[i]  # the activation's gradient but for the gate, whose own gradient is ⟨dout, a⟩
            a, dh = activation.backward(keep, dout * gate)
            dgates[:, i].index_add_(0, rows, dout.mul_(a).sum(-1, dtype=gates.dtype))
            torch.mm(dys.mul_(gate).T, a, out=ddown[i])
            parts = dh.chunk(activation.width, -1)
            for dup, part in zip(dups, parts, strict=True):
                torch.mm(part.T, xs, out=dup[i])
            for up, part in zip(ups, parts, strict=True):
                dx.index_add_(0, rows, part @ up[i])
        return dx, dgates, None, None, ddown, *dups

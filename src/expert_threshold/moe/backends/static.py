"""A backend with static shapes, for CUDA graphs. If `is_native` is True and loads are bounded, the host never waits.

The rows of all experts share one buffer. Its size is the rule's bound or else the number of pairs, for which the host
waits once. Only the device knows where the rows of an expert end. Products skip the padding after the last row. Only
the input, the pre-activations and the indices are saved for backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import refuse_second_derivative
from ...kernels.activation import Activation
from ...kernels.segments import Segments, gate_of_rows, segments
from ..experts import Experts

PADDING_PER_BAG = 64


def static_sum(x: Tensor, gates: Tensor, assignment: Tensor, experts: Experts, rows: int | None) -> Tensor:
    """Return the routed sum. rows: an upper bound on the number of assigned pairs; None counts them."""
    weights = experts.down.to(x.dtype), *experts.ups(x.dtype)
    y: Tensor = _Static.apply(x, gates, experts.activation, *segments(assignment, rows), *weights)
    return y


def sum_by_token(rows: Tensor, segments: Segments, weights: Tensor | None = None) -> Tensor:
    """Sum each token's weighted rows in the order of experts, without padding. The result is (tokens, width).

    rows: (rows, width); weights: (rows,), of the same dtype.
    """
    if not len(rows):
        return rows.new_zeros(len(segments.of_token) - 1, rows.shape[1])
    # Padding goes into bags that are discarded. They are small, since CUDA sums the rows of a bag sequentially.
    end = segments.of_token[-1:]
    padding = end + PADDING_PER_BAG * torch.arange(-(-len(rows) // PADDING_PER_BAG), device=end.device)
    bags = torch.cat((segments.of_token[:-1], padding.clamp(max=len(rows))))
    weights = None if weights is None else weights.index_select(0, segments.by_token)
    y: Tensor = torch.embedding_bag(rows, segments.by_token, bags, False, 0, False, weights)[0]
    return y[: len(segments.of_token) - 1].clone()  # an autograd function may not return a view


@torch.library.custom_op("expert_threshold::segment_product", mutates_args=())
def segment_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows (rows, in) by the weights (experts, in, out) of their segments. Padding is unspecified."""
    if is_native(rows, *weights.shape[1:]):
        return F.grouped_mm(rows, weights, offs=ends)
    y = rows.new_empty(len(rows), weights.shape[2])
    start = 0
    for end, weight in zip(ends.tolist(), weights, strict=True):
        torch.mm(rows[start:end], weight, out=y[start:end])
        start = end
    return y


@segment_product.register_fake
def _(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[2])


@torch.library.custom_op("expert_threshold::segment_outer", mutates_args=())
def segment_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return leftᵀ right of each segment, (experts, m, n), for left (rows, m) and right (rows, n); zeros if empty."""
    if is_native(left, left.shape[1], right.shape[1]):
        return F.grouped_mm(left.mT, right, offs=ends)
    y = left.new_empty(len(ends), left.shape[1], right.shape[1])
    start = 0
    for end, product in zip(ends.tolist(), y, strict=True):
        torch.mm(left[start:end].mT, right[start:end], out=product)
        start = end
    return y


@segment_outer.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def is_native(rows: Tensor, *widths: int) -> bool:
    """Return True if PyTorch multiplies segments of these widths in one kernel; otherwise the host reads their ends.

    The kernel rejects a sum over zero rows (pytorch #192497).
    """
    return len(rows) > 0 and in_one_kernel(rows.dtype, *widths) and on_hopper(rows)


def in_one_kernel(dtype: torch.dtype, *widths: int) -> bool:
    """Return True if the GPU has this kernel and the kernel accepts the dtype and the widths."""
    return dtype == torch.bfloat16 and all(width % 8 == 0 for width in widths)


def on_hopper(x: Tensor) -> bool:
    """Return True if x is on a GPU of compute capability 9.x."""
    # Not 10.x, where grouped_mm gives experts without tokens nonzero gradients (pytorch #172439).
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9


class _Static(torch.autograd.Function):
    """The routed sum; gates multiply rows of width d_model while these are summed or gathered, as in `grouped`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor, activation: Activation, *rest: Tensor) -> Tensor:
        packed, (down, *ups) = Segments(*rest[:5]), rest[5:]
        xs = x.index_select(0, packed.token)
        products = [segment_product(xs, up.mT, packed.ends) for up in ups]
        keep = activation.keep(products[0] if len(products) == 1 else torch.cat(products, 1))
        ys = segment_product(activation.value(keep), down.mT, packed.ends)
        ctx.activation = activation
        ctx.save_for_backward(x, gates, *packed, keep, down, *ups)
        return sum_by_token(ys, packed, gate_of_rows(gates, packed).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        x, gates, *rest = ctx.saved_tensors
        packed, (keep, down, *ups) = Segments(*rest[:5]), rest[5:]
        activation: Activation = ctx.activation
        gate = gate_of_rows(gates, packed)
        scale = (gate * activation.scale).to(x.dtype)
        dys = dy.index_select(0, packed.token)
        a = activation.value(keep)
        ddown = segment_outer(dys * gate.to(x.dtype)[:, None], a, packed.ends)
        da = segment_product(dys, down, packed.ends)
        dgate = torch.sum(a * da, 1, dtype=gates.dtype)
        dh = activation.slope(keep, da)
        xs = x.index_select(0, packed.token) * scale[:, None]
        parts = dh.chunk(activation.width, 1)
        dups = [segment_outer(part, xs, packed.ends) for part in parts]
        dxs = segment_product(parts[0], ups[0], packed.ends)
        for part, up in zip(parts[1:], ups[1:], strict=True):
            dxs = dxs + segment_product(part, up, packed.ends)
        dx = sum_by_token(dxs, packed, scale)
        dgates = dgate.new_zeros(gates.numel() + 1).scatter_(0, packed.pair, dgate)[:-1]
        return dx, dgates.view_as(gates), None, None, None, None, None, None, ddown, *dups

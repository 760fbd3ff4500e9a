"""A backend that gathers each expert's tokens, multiplies them twice, and returns gate-weighted sums to the tokens.

Products of neighbouring experts are batched; an expert may have any number of tokens, including 0. Only the input, the
pre-activations and the assignment are saved for backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels import refuse_second_derivative
from ...kernels.activation import Activation, activation_named
from ..experts import HIDDEN_PER_BLOCK, Experts, up_project


def grouped_sum(x: Tensor, gates: Tensor, assignment: Tensor, experts: Experts, rows: int | None) -> Tensor:
    """Return the routed sum. rows: an upper bound on the number of assigned pairs, which only a compiler needs."""
    weights = [experts.down.to(x.dtype), *experts.ups(x.dtype)]
    if torch.compiler.is_compiling():
        slots = most_slots(assignment.numel() if rows is None else rows)
        y: Tensor = grouped_forward(x, gates, assignment, weights, experts.activation.name, slots)[0]
    else:
        y = _Grouped.apply(x, gates, assignment, experts.activation, *weights)
    return y


class Group(NamedTuple):
    """Neighbouring experts that share a batched product. Each expert has `length` slots."""

    experts: slice
    length: int
    slots: slice

    def of(self, rows: Tensor) -> Tensor:
        """Return the group's rows of (slots, …) as a view (experts, length, …)."""
        rows = rows[self.slots]
        return rows.view(-1, self.length, *rows.shape[1:])


def most_slots(rows: int) -> int:
    """Return the maximum number of rows to compute if `rows` are needed. A quarter is added for padding."""
    return rows + rows // 4  # integers, since the compiler has no symbolic floats


def round_up(load: int) -> int:
    """Round a load up to four significant bits, which increases it by at most one eighth."""
    unit = 1 << max((load - 1).bit_length() - 4, 0)
    return -(-load // unit) * unit


def form_groups(loads: list[int], hidden: int, limit: float = HIDDEN_PER_BLOCK) -> list[Group]:
    """Group all experts, or halves of them, quarters, and so on, such that no group exceeds `limit` hidden activations
    or `most_slots`. Experts without tokens are left out, so they cost nothing during decoding.

    Loads are rounded up so that few shapes occur, since oneDNN compiles a kernel for every new shape.
    """
    groups: list[Group] = []

    def add(first: int, end: int) -> None:
        length = round_up(max(loads[first:end], default=0))
        slots = length * (end - first)
        fits = slots * hidden <= limit and slots <= most_slots(sum(loads[first:end]))
        if end - first > 1 and not (fits and all(loads[first:end])):
            middle = (first + end) // 2
            add(first, middle)
            add(middle, end)
        elif slots:
            start = groups[-1].slots.stop if groups else 0
            groups.append(Group(slice(first, end), length, slice(start, start + slots)))

    add(0, len(loads))
    return groups


class Packing(NamedTuple):
    """Indices for gathering and summing. Pairs, of a token and one of its experts, are ordered by expert, then token.

    For example, expert 0 gets tokens 0, 1 and 3, and expert 1 gets tokens 0, 2 and 3. If both experts are in one group
    and have four slots each, the indices are:

        pair      0  2  6  1  5  7
        token     0  1  3  0  2  3
        slot      0  1  2  4  5  6         slots 3 and 7 are padding
        of_slot   0  1  2  3  3  4  5  6   slot 3 covers [3, 3), which has no pair, and slot 7 starts at the end
        by_token  0  3  1  4  2  5         pairs 0 and 3 belong to token 0, pair 1 to token 1, …
        of_token  0  2  3  4
    """

    pair: Tensor  # (pairs,) token · experts + expert
    token: Tensor  # (pairs,)
    slot: Tensor  # (pairs,)
    of_slot: Tensor  # (slots,) the first pair at or after the slot; padding slots hold none
    by_token: Tensor  # (pairs,) the pairs, ordered by token
    of_token: Tensor  # (tokens,) where each token's pairs start in `by_token`


def pack(assignment: Tensor, groups: list[Group]) -> Packing:
    """Return the packing of an assignment (tokens, experts) bool into slots."""
    expert, token = assignment.T.nonzero().unbind(1)
    loads = assignment.sum(0)
    first = loads.cumsum(0) - loads
    start, of_slot = first.new_zeros(len(loads)), [token[:0]]
    for group in groups:
        place = torch.arange(group.length, device=token.device)
        start[group.experts] = torch.arange(group.slots.start, group.slots.stop, group.length, device=token.device)
        of_slot.append((first[group.experts, None] + place.minimum(loads[group.experts, None])).flatten())
    slot = torch.arange(len(token), device=token.device) + (start - first)[expert]
    fanout = assignment.sum(1)
    pair = token * assignment.shape[1] + expert
    by_token = token.argsort(stable=True)
    return Packing(pair, token, slot, torch.cat(of_slot), by_token, fanout.cumsum(0) - fanout)


def sum_rows(rows: Tensor, index: Tensor, begins: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return weighted sums: row i sums rows[index[j]] over begins[i] ≤ j < begins[i + 1]; an empty sum is zero."""
    if not len(begins) or not len(index):
        return rows.new_zeros(len(begins), rows.shape[1])
    y: Tensor = torch.embedding_bag(rows, index, begins, False, 0, False, weights)[0]
    return y


class Plan(NamedTuple):
    """The groups of experts for an assignment, and its packing."""

    groups: list[Group]
    packing: Packing

    @classmethod
    def of(cls, assignment: Tensor, hidden: int) -> Plan:
        limit = HIDDEN_PER_BLOCK if assignment.is_cpu else math.inf
        groups = form_groups(assignment.sum(0).tolist(), hidden, limit)
        return cls(groups, pack(assignment, groups))


def _forward(
    x: Tensor, gates: Tensor, plan: Plan, activation: Activation, weights: Sequence[Tensor], kept: Tensor
) -> Tensor:
    """Return y, which is computed group by group so that intermediates stay in cache.

    Gates are applied at no cost, while rows of width d_model are gathered or summed, and never to hidden activations.

    weights: down, then ups; kept: (slots or more, width · d_expert), a buffer that receives what backward needs.
    """
    (down, *ups), (groups, packing) = weights, plan
    xs = sum_rows(x, packing.token, packing.of_slot)
    ys = torch.empty_like(xs)
    for group in groups:
        keep = group.of(kept)
        up_project(group.of(xs), tuple(up[group.experts] for up in ups), out=keep)
        torch.bmm(activation.value(activation.keep(keep)), down[group.experts].mT, out=group.of(ys))
    gate = gates.flatten().index_select(0, packing.pair).to(x.dtype)
    return sum_rows(ys, packing.slot[packing.by_token], packing.of_token, gate[packing.by_token])


def _backward(
    dy: Tensor, x: Tensor, gates: Tensor, plan: Plan, activation: Activation, weights: Sequence[Tensor], kept: Tensor
) -> list[Tensor]:
    """Return the gradients of x, gates, down and ups."""
    (down, *ups), (groups, packing) = weights, plan
    gate = gates.flatten().index_select(0, packing.pair)
    scale = (gate * activation.scale).to(x.dtype)
    xs = sum_rows(x, packing.token, packing.of_slot, scale)
    dys = sum_rows(dy, packing.token, packing.of_slot)
    gated_dys = sum_rows(dy, packing.token, packing.of_slot, gate.to(x.dtype))
    dxs, dgate = torch.empty_like(xs), gates.new_empty(len(xs))
    all_have_tokens = sum(len(group.of(dgate)) for group in groups) == len(down)
    new = torch.empty_like if all_have_tokens else torch.zeros_like  # filling costs as much as a tenth of a product
    ddown, dups = new(down), [new(up) for up in ups]
    for group in groups:
        keep = group.of(kept)
        a = activation.value(keep)
        torch.bmm(group.of(gated_dys).mT, a, out=ddown[group.experts])
        da = torch.bmm(group.of(dys), down[group.experts])
        torch.sum(a.mul_(da), -1, dtype=gates.dtype, out=group.of(dgate))
        parts = activation.slope(keep, da).chunk(activation.width, -1)
        torch.bmm(parts[0], ups[0][group.experts], out=group.of(dxs))
        for up, dup, part in zip(ups, dups, parts, strict=True):
            torch.bmm(part.mT, group.of(xs), out=dup[group.experts])
            if up is not ups[0]:
                group.of(dxs).baddbmm_(part, up[group.experts])
    dx = sum_rows(dxs, packing.slot[packing.by_token], packing.of_token, scale[packing.by_token])
    dgates = torch.zeros(gates.numel(), dtype=gates.dtype, device=gates.device)
    dgates[packing.pair] = dgate[packing.slot]
    return [dx, dgates.view_as(gates), ddown, *dups]


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gates: Tensor, assignment: Tensor, activation: Activation, *weights: Tensor
    ) -> Tensor:
        plan = Plan.of(assignment, weights[0].shape[2])
        kept = x.new_empty(len(plan.packing.of_slot), activation.width * weights[0].shape[2])
        y = _forward(x, gates, plan, activation, weights, kept)
        ctx.activation, ctx.groups = activation, plan.groups
        ctx.save_for_backward(x, gates, kept, *plan.packing, *weights)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        x, gates, kept, *rest = ctx.saved_tensors
        packed = len(Packing._fields)
        plan = Plan(ctx.groups, Packing(*rest[:packed]))
        dx, dgates, *dweights = _backward(dy, x, gates, plan, ctx.activation, rest[packed:], kept)
        return dx, dgates, None, None, *dweights


# The same for the compiler. Both halves are opaque to it, since groups and the sizes of the plan depend on loads. So
# the plan cannot be kept but is made twice, a cost that `_Grouped` avoids for small layers.


@torch.library.custom_op("expert_threshold::grouped_forward", mutates_args=())
def grouped_forward(
    x: Tensor, gates: Tensor, assignment: Tensor, weights: list[Tensor], activation: str, slots: int
) -> tuple[Tensor, Tensor]:
    """Return y and what backward needs, (slots, width · d_expert). On a CPU, unused slots are never touched.

    weights: down, then ups. Raises RuntimeError if the pairs do not fit into the slots.
    """
    act, hidden = activation_named(activation), weights[0].shape[2]
    plan = Plan.of(assignment, hidden)
    if len(plan.packing.of_slot) > slots:
        raise RuntimeError(f"there are more token-expert pairs than {slots} slots")
    kept = x.new_empty(slots, act.width * hidden)
    return _forward(x, gates, plan, act, weights, kept), kept


@grouped_forward.register_fake
def _(
    x: Tensor, gates: Tensor, assignment: Tensor, weights: list[Tensor], activation: str, slots: int
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(slots, activation_named(activation).width * weights[0].shape[2])


@torch.library.custom_op("expert_threshold::grouped_backward", mutates_args=())
def grouped_backward(
    dy: Tensor, x: Tensor, gates: Tensor, assignment: Tensor, weights: list[Tensor], activation: str, kept: Tensor
) -> list[Tensor]:
    """Return the gradients of x, the gates and the weights."""
    plan = Plan.of(assignment, weights[0].shape[2])
    return _backward(dy, x, gates, plan, activation_named(activation), weights, kept)


@grouped_backward.register_fake
def _(
    dy: Tensor, x: Tensor, gates: Tensor, assignment: Tensor, weights: list[Tensor], activation: str, kept: Tensor
) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in (x, gates, *weights)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, gates, assignment, weights, ctx.activation, _ = inputs
    ctx.save_for_backward(x, gates, assignment, output[1], *weights)
    ctx.set_materialize_grads(False)


def _back(ctx: Any, dy: Tensor, _: None) -> tuple[Any, ...]:
    refuse_second_derivative()
    x, gates, assignment, kept, *weights = ctx.saved_tensors
    dx, dgates, *dweights = grouped_backward(dy, x, gates, assignment, weights, ctx.activation, kept)
    return dx, dgates, None, dweights, None, None


grouped_forward.register_autograd(_back, setup_context=_keep)

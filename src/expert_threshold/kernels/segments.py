"""The rows of all experts in one buffer, each expert's contiguous; shapes depend only on the arguments' shapes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Segments(NamedTuple):
    """Rows ordered by expert, then token: adjacent segments, one per expert, followed by padding."""

    token: Tensor  # (rows,) the token of each row; 0 in padding
    pair: Tensor  # (rows,) token · experts + expert; tokens · experts in padding
    ends: Tensor  # (experts,) int32, where each segment ends
    by_token: Tensor  # (rows,) the rows in use, ordered by token; then padding
    of_token: Tensor  # (tokens + 1,) where each token's rows begin in `by_token`; last the number of rows in use


def segments(assignment: Tensor, rows: int | None) -> Segments:
    """Return the pairs of assignment (tokens, experts) bool, by expert, then token, in a buffer of `rows` rows.

    rows=None counts them, which waits for the device; while a compiler traces, it allows for every possible pair.
    Raises RuntimeError, on CUDA asynchronously, if there are more pairs than rows.
    """
    if rows is None:
        rows = assignment.numel() if torch.compiler.is_compiling() else int(assignment.sum())
    tokens, experts = assignment.shape
    by_expert = assignment.T.flatten()
    row, ends = by_expert.cumsum(0) - 1, assignment.sum(0).cumsum(0)
    pairs = torch.arange(tokens, device=row.device) * experts + torch.arange(experts, device=row.device)[:, None]
    if tokens and experts:
        torch._assert_async(
            (ends[-1] <= rows), f"more pairs of tokens and experts than the {rows} rows they were given"
        )
    pair = scatter(pairs.flatten(), row.where(by_expert, rows), rows, filled_with=tokens * experts)
    fanout = assignment.sum(1).cumsum(0)
    place = assignment.flatten().cumsum(0) - 1
    row_of_pair = row.view(experts, tokens).T.flatten()
    return Segments(
        token=torch.div(pair, max(experts, 1), rounding_mode="floor").where(pair < tokens * experts, 0),
        pair=pair,
        ends=ends.int(),
        by_token=scatter(row_of_pair, place.where(assignment.flatten(), rows), rows, filled_with=0),
        of_token=torch.cat((fanout.new_zeros(1), fanout)),
    )


def scatter(values: Tensor, places: Tensor, length: int, filled_with: int) -> Tensor:
    """Return (length,) with the values at their distinct places; those past the end are dropped."""
    return values.new_full((length + 1,), filled_with).scatter_(0, places.clamp(max=length), values)[:length]


def gate_of_rows(gates: Tensor, packed: Segments) -> Tensor:
    """Return the gate of every row, 0 for padding."""
    return torch.cat((gates.flatten(), gates.new_zeros(1))).index_select(0, packed.pair)

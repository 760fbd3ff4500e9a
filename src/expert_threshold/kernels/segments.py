"""One buffer for the rows of all experts, contiguous for each expert. Shapes depend only on the arguments' shapes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Segments(NamedTuple):
    """Rows ordered by expert, then token, in one segment per expert. Segments are adjacent and followed by padding."""

    token: Tensor  # (rows,) the token of each row; 0 in padding
    pair: Tensor  # (rows,) token · experts + expert; tokens · experts in padding
    ends: Tensor  # (experts,) int32, where each segment ends
    by_token: Tensor  # (rows,) the rows in use, ordered by token; then padding
    of_token: Tensor  # (tokens + 1,) where each token's rows start in `by_token`; last, the number of rows in use


def segments(assignment: Tensor, rows: int | None) -> Segments:
    """Return the pairs of assignment (tokens, experts) bool in a buffer of `rows` rows, ordered by expert, then token.

    rows=None counts the pairs, which waits for the device; while a compiler traces, it reserves rows for every possible
    pair. Raises RuntimeError, asynchronously on CUDA, if there are more pairs than rows.
    """
    if rows is None:
        rows = assignment.numel() if torch.compiler.is_compiling() else int(assignment.sum())
    tokens, experts = assignment.shape
    ends, fanout = assignment.sum(0).cumsum(0), assignment.sum(1).cumsum(0)
    if tokens and experts:
        torch._assert_async(ends[-1] <= rows, f"there are more token-expert pairs than the {rows} rows for them")
    expert, token = assignment.T.nonzero_static(size=rows, fill_value=-1).unbind(1)
    padding = token < 0
    return Segments(
        token=token.clamp(min=0),
        pair=(token * experts + expert).where(~padding, tokens * experts),
        ends=ends.int(),
        by_token=token.where(~padding, tokens).int().argsort(stable=True),  # 32 bits: half the passes of a radix sort
        of_token=torch.cat((fanout.new_zeros(1), fanout)),
    )


def gate_of_rows(gates: Tensor, packed: Segments) -> Tensor:
    """Return the gate of every row, which is 0 in padding."""
    return torch.cat((gates.flatten(), gates.new_zeros(1))).index_select(0, packed.pair)

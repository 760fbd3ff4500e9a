"""Exact selection of the k-th largest scores on a GPU by radix selection in Triton. Every round reads the scores once.

A token's key has 64 bits: its score, encoded so that keys sort like scores, then its index, counted down. An expert's
keys are unique, so the k-th largest key belongs to one token and ties need no special case. A round finds one digit of
that key: it counts the values of this digit among the tokens that share all higher digits, then takes the largest value
that leaves enough tokens. Nothing is sorted, and the host does not wait. Counts are integers, so their sums do not
depend on the order and the cut is deterministic.

Digits have up to 11 bits. The first holds the sign, the exponent and two bits of the fraction: for normally distributed
scores at most one token in twenty shares it with the k-th, so later rounds count very few. With 8 bits, more than one
in four would share it, and there would be one more round. Few values of the first digit occur, so counting is spread
over several copies of the histogram to reduce contention between atomics.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from .selection import scores_of, ties_on_lower_ranks

# (bits below the digit, bits of the digit), most significant first.
SCORE_DIGITS = ((53, 11), (42, 11), (32, 10))
INDEX_DIGITS = ((22, 10), (11, 11), (0, 11))
TILE = 2048  # scores that one program reads
TOKENS_PER_COPY = 2**15
MAX_COPIES = 16
INDEX = 2**32 - 1  # the lower half of a key


def select(scores: Tensor, ks: Sequence[int], group: dist.ProcessGroup | None = None) -> tuple[Tensor, Tensor]:
    """Return the k-th largest scores and their indices, both (ks, pools, experts), as defined by `kth_largest`.

    scores: (pools, tokens, experts) float32, any strides; with a group, one pool spread over its ranks.
    """
    pools, tokens, experts = scores.shape
    # Filled, not copied: copying a list from the host would synchronize.
    k = torch.stack([scores.new_full((pools, experts), k, dtype=torch.int32) for k in ks])
    remaining = k.clone()  # number of tokens to take among those that share the prefix
    prefix = torch.zeros_like(k, dtype=torch.int64)  # the k-th largest key: its digits found so far, then zeros
    of_score, of_index = digits(tokens)
    for below, bits in of_score:
        histogram = own = _histogram(scores, prefix, below, bits)
        if group is not None:
            histogram = own.sum(0, keepdim=True, dtype=own.dtype)
            dist.all_reduce(histogram, group=group)
        _find_digit(histogram, remaining, prefix, below, bits)
    if group is not None:  # ties on lower ranks come first; this rank takes at most its own ties
        digit = (prefix >> below) & ((1 << bits) - 1)
        ties = own.sum(0).gather(-1, digit[..., None])[..., 0]
        remaining = (remaining - ties_on_lower_ranks(ties, group)).minimum(ties).int()
    for below, bits in of_index:
        _find_digit(_histogram(scores, prefix, below, bits), remaining, prefix, below, bits)
    last = torch.where(remaining > 0, tokens - 1 - (prefix & INDEX), -1)
    return torch.where(k > 0, scores_of((prefix >> 32) & INDEX), torch.inf), last


def digits(tokens: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the digits of scores and indices for pools of `tokens` tokens. Each digit takes a pass over the scores."""
    return [*SCORE_DIGITS], [(below, bits) for below, bits in INDEX_DIGITS if tokens > 1 << below]


def _histogram(scores: Tensor, prefix: Tensor, below: int, bits: int) -> Tensor:
    """Count the tokens that share the prefix, grouped by their next digit. Returns int32 counts
    (copies, ks, pools, experts, digits), which must be summed over copies. Before the first digit, all ks share one
    histogram, and the second size is 1.
    """
    pools, tokens, experts = scores.shape
    ks = 1 if (below, bits) == SCORE_DIGITS[0] else len(prefix)
    copies = min(max(tokens // TOKENS_PER_COPY, 1), MAX_COPIES)
    histogram = torch.zeros(copies, ks, pools, experts, 1 << bits, dtype=torch.int32, device=scores.device)
    tile_experts = min(triton.next_power_of_2(max(experts, 1)), 32)
    tile_tokens = TILE // tile_experts
    grid = (triton.cdiv(tokens, tile_tokens), pools, triton.cdiv(experts, tile_experts))
    if scores.numel():
        constants = (ks, copies, below, bits, tile_tokens, tile_experts)
        _count_digits[grid](scores, prefix, histogram, tokens, experts, *scores.stride(), *constants)
    return histogram


def _find_digit(histogram: Tensor, remaining: Tensor, prefix: Tensor, below: int, bits: int) -> None:
    """Append the next digit to the prefix and subtract the tokens above it from `remaining`, both in place."""
    if prefix.numel():
        copies, ks = histogram.shape[:2]
        grid = (prefix[0].numel(), len(prefix))
        _take_digit[grid](histogram, remaining, prefix, copies, ks, below, bits)


@triton.jit
def _ordered(score: tl.tensor) -> tl.tensor:
    """Map float32 scores to unsigned integers in the same order. ±0 share one value, and NaN maps to the largest.

    Only integers are compared, since comparing floats may flush denormals to zero.
    """
    bits = score.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    bits = tl.where(magnitude == 0, 0, tl.where(magnitude > 0x7F800000, 0x7FFFFFFF, bits))
    return tl.where(bits < 0, ~bits, bits ^ -0x80000000).to(tl.uint32, bitcast=True)


@triton.jit
def _count_digits(
    scores: tl.tensor, prefixes: tl.tensor,  # (ks, pools, experts)
    histograms: tl.tensor,  # (copies, ks, pools, experts, digits)
    tokens: tl.tensor, experts: tl.tensor,
    pool_stride: tl.tensor, token_stride: tl.tensor, expert_stride: tl.tensor,
    ks: tl.constexpr, copies: tl.constexpr, below: tl.constexpr, bits: tl.constexpr,
    tile_tokens: tl.constexpr, tile_experts: tl.constexpr,
) -> None:  # fmt: skip
    """Count digits; one program covers `tile_tokens` tokens of one pool and `tile_experts` experts."""
    block, pool, pools = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    index = block.to(tl.int64) * tile_tokens + tl.arange(0, tile_tokens)
    expert = tl.program_id(2).to(tl.int64) * tile_experts + tl.arange(0, tile_experts)
    inside = (index < tokens)[:, None] & (expert < experts)[None, :]
    place = pool * pool_stride + index[:, None] * token_stride + expert[None, :] * expert_stride
    order = _ordered(tl.load(scores + place, mask=inside, other=0.0)).to(tl.uint64)
    key = (order << 32) | (tokens - 1 - index).to(tl.uint32).to(tl.uint64)[:, None]
    digit = ((key >> below) & ((1 << bits) - 1)).to(tl.int64)
    for row in range(ks):
        column = (row * pools + pool) * experts + expert
        prefix = tl.load(prefixes + column, mask=expert < experts, other=0).to(tl.uint64, bitcast=True)
        shared = ((key ^ prefix[None, :]) >> below) >> bits == 0  # in two steps: a shift by 64 is undefined
        first = ((block % copies) * ks * pools * experts + column) << bits
        tl.atomic_add(histograms + first[None, :] + digit, 1, mask=inside & shared, sem="relaxed")


@triton.jit
def _take_digit(
    histograms: tl.tensor, remaining: tl.tensor, prefixes: tl.tensor,
    copies: tl.constexpr, ks: tl.constexpr, below: tl.constexpr, bits: tl.constexpr,
) -> None:  # fmt: skip
    """Find the next digit; one program covers one k for one expert of one pool."""
    column, row, columns = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    digit = tl.arange(0, 1 << bits)
    count = tl.zeros_like(digit)
    for copy in range(copies):
        first = ((copy * ks + row % ks).to(tl.int64) * columns + column) << bits
        count += tl.load(histograms + first + digit)
    place = row * columns + column
    wanted = tl.load(remaining + place)
    at_or_above = tl.cumsum(count, 0, reverse=True)
    found = tl.sum((at_or_above >= wanted).to(tl.int32), 0) - 1  # the largest digit with enough tokens
    tl.store(prefixes + place, tl.load(prefixes + place) | (found.to(tl.int64) << below))
    tl.store(remaining + place, wanted - tl.sum(tl.where(digit > found, count, 0), 0))

"""Exact order statistics of a score matrix, ties included, over one rank or many.

An expert's tokens are ordered by score, highest first, with ties going to the lower token index. A `Cut` is a position
in that order; it takes the tokens up to and including that position. The k-th largest score with its index is the cut
that takes exactly k tokens; a cutoff c is the cut (c, -1), which takes the tokens with score > c and no ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._triton import has_triton_package


class Cut(NamedTuple):
    """Positions in each expert's order of tokens, with the shape (…, experts)."""

    score: Tensor  # float32
    last: Tensor  # int64, index of the last token taken among those with exactly this score; -1 takes none of them

    def where(self, condition: Tensor, other: Cut) -> Cut:
        """Return this cut where the condition holds, and the other cut elsewhere."""
        return Cut(self.score.where(condition, other.score), self.last.where(condition, other.last))


def take(scores: Tensor, cut: Cut) -> Tensor:
    """Return the mask of tokens that the cut takes. scores: (pools, tokens, experts), cut: (pools or 1, experts)."""
    index = torch.arange(scores.shape[1], device=scores.device)[:, None]
    score, last = cut.score[:, None], cut.last[:, None]
    return (scores > score) | ((scores == score) & (index <= last))


def clamp(cutoff: Tensor, at_least: Cut, at_most: Cut) -> Cut:
    """Return the cut that takes n = clamp(#{score > cutoff}, k_min, k_max) tokens.

    cutoff: (experts,); at_least, at_most: the cuts (pools, experts) that take the k_min and the k_max largest scores.
    """
    too_many, too_few = at_most.score > cutoff, at_least.score <= cutoff
    unclamped = Cut(cutoff, torch.full_like(at_most.last, -1))
    return at_most.where(too_many, at_least.where(too_few, unclamped))


def kth_largest(scores: Tensor, ks: Sequence[int], group: dist.ProcessGroup | None = None) -> list[Cut]:
    """Return a cut for every k in `ks` that takes exactly k tokens; ties go to the lower rank, then the lower index.

    scores: (pools, tokens, experts) float32 without NaN; without a group, float64 also works, but slowly. Every k is
    between 0 and the number of tokens in a pool. With a `group`, there is one pool, spread evenly or unevenly over the
    group's ranks. The cuts have the shape (pools, experts), and their indices are local to the rank.
    """
    known = (torch.float32, torch.float64) if group is None else (torch.float32,)
    assert scores.dtype in known, f"scores must be float32, not {scores.dtype}"
    assert group is None or len(scores) == 1, "a pool across ranks cannot be split"
    if group is None:
        found = _kth_largest(scores, list(ks))
    elif _has_kernels(scores):
        from . import radix

        found = radix.select(scores, ks, group)
    else:
        found = _radix_select(scores, ks, group)
    return [Cut(*cut) for cut in zip(*found, strict=True)]


# An exported model has a copy of this file. An operator of the same name would replace ours, which then crashes.
@torch.library.custom_op(f"{__name__.replace('.', '_')}::kth_largest", mutates_args=())
def _kth_largest(scores: Tensor, ks: list[int]) -> tuple[Tensor, Tensor]:
    """Return the k-th largest scores and their indices, both (ks, pools, experts). This is opaque to torch.compile."""
    is_float32 = scores.dtype == torch.float32
    if is_float32 and runs_on_kernels(scores):
        from . import radix

        with torch.cuda.device_of(scores):
            return radix.select(scores, ks)
    fastest = _kth_largest_in_linear_time if is_float32 and scores.device.type == "cpu" else _kth_largest_by_sorting
    return fastest(scores, ks)


@_kth_largest.register_fake
def _(scores: Tensor, ks: list[int]) -> tuple[Tensor, Tensor]:
    shape = (len(ks), scores.shape[0], scores.shape[2])
    return scores.new_empty(shape), scores.new_empty(shape, dtype=torch.int64)


SORTED_AT_ONCE = 4096  # torch sorts this many in one GPU block, which is cheaper than histograms


def runs_on_kernels(scores: Tensor) -> bool:
    """Return True if Triton is available and the pools of scores (pools, tokens, experts) are large enough for it."""
    return _has_kernels(scores) and scores.shape[1] > SORTED_AT_ONCE


def _has_kernels(scores: Tensor) -> bool:
    return scores.is_cuda and has_triton_package()


def _kth_largest_by_sorting(scores: Tensor, ks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return scores and indices by definition: sort each expert's tokens stably and take the k-th."""
    ordered, order = scores.sort(dim=1, descending=True, stable=True)
    shape = (scores.shape[0], scores.shape[2])
    nothing = Cut(scores.new_full(shape, torch.inf), order.new_full(shape, -1))
    cuts = [Cut(ordered[:, k - 1], order[:, k - 1]) if k else nothing for k in ks]
    return torch.stack([cut.score for cut in cuts]), torch.stack([cut.last for cut in cuts])


CACHED = 2**17  # scores in one block, few enough to stay in a core's cache


def _kth_largest_in_linear_time(scores: Tensor, ks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the same result as `_kth_largest_by_sorting`, in linear time, on the CPU."""
    columns = _columns(scores.numpy())
    tokens = columns.shape[1]
    score = np.full((len(ks), len(columns)), np.inf, np.float32)
    last = np.full((len(ks), len(columns)), -1, np.int64)
    widest_first = sorted((row for row, k in enumerate(ks) if k), key=lambda row: -ks[row])
    width = max(CACHED // max(tokens, 1), 1)
    for start in range(0, len(columns), width):
        block = top = columns[start : start + width]
        for row in widest_first:  # each k is selected among the tokens left by the next larger k
            if ks[row] < top.shape[1]:
                top = np.partition(top, -ks[row], axis=1)[:, -ks[row] :]
            kth = np.fmin.reduce(top, axis=1, keepdims=True) + 0.0  # NaN counts as the largest; -0.0 becomes 0.0
            # Positions of all tokens with the k-th score; the extra one is for NaN, which equals nothing.
            ties = np.append(np.flatnonzero(block == kth), -1)
            first = np.searchsorted(ties[:-1], np.arange(len(block)) * tokens)
            score[row, start : start + width] = kth[:, 0]
            last[row, start : start + width] = ties[first + (top == kth).sum(1) - 1] % tokens
    shape = (len(ks), scores.shape[0], scores.shape[2])
    return torch.from_numpy(score).reshape(shape), torch.from_numpy(last).reshape(shape)


def _columns(scores: np.ndarray) -> np.ndarray:
    """Copy scores (pools, tokens, experts) to contiguous (pools · experts, tokens), in blocks that fit the cache."""
    pools, tokens, experts = scores.shape
    columns = np.empty((pools, experts, tokens), np.float32)
    for start in range(0, tokens, 4096):
        columns[..., start : start + 4096] = scores[:, start : start + 4096].transpose(0, 2, 1)
    return columns.reshape(pools * experts, tokens)


DIGITS = (11, 11, 10)  # bits of a float32 key per round, most significant first


def _radix_select(scores: Tensor, ks: Sequence[int], group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Select from a pool that spans all ranks, by exchanging histograms. scores: (1, tokens of this rank, experts)."""
    keys = _ordered_keys(scores[0])
    experts = keys.shape[1]
    k = torch.tensor(ks, device=keys.device)[:, None]
    remaining = k.expand(-1, experts)  # number of tokens to take among those that share the prefix
    prefix = torch.zeros_like(remaining)  # the leading digits of the k-th largest key, found so far
    column = torch.arange(prefix.numel(), device=keys.device).view(len(ks), 1, experts)
    bits_below = sum(DIGITS)
    for bits in DIGITS:
        shares_prefix = (keys >> bits_below) == prefix[:, None]
        bits_below -= bits
        digit = (keys >> bits_below) & ((1 << bits) - 1)
        histogram = torch.zeros(prefix.numel() << bits, dtype=torch.int64, device=keys.device)
        histogram.scatter_add_(0, ((column << bits) + digit).flatten(), shares_prefix.long().flatten())
        dist.all_reduce(histogram, group=group)
        histogram = histogram.view(len(ks), experts, -1)
        at_or_above = histogram.flip(-1).cumsum(-1).flip(-1)
        found = (at_or_above >= remaining[..., None]).sum(-1, keepdim=True) - 1  # the largest digit with enough tokens
        above = at_or_above.gather(-1, found) - histogram.gather(-1, found)
        prefix, remaining = (prefix << bits) + found[..., 0], remaining - above[..., 0]
    ties = keys == prefix[:, None]
    count = remaining - ties_on_lower_ranks(ties.sum(1), group)
    # The index of the count-th tie: -1 if count < 1, the last token if this rank has too few.
    last = (ties.cumsum(1) < count[:, None]).sum(1).clamp(max=ties.shape[1] - 1).where(count > 0, -1)
    return torch.where(k > 0, scores_of(prefix), torch.inf)[:, None], last[:, None]


def ties_on_lower_ranks(ties: Tensor, group: dist.ProcessGroup) -> Tensor:
    everyone = [torch.empty_like(ties) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, ties, group=group)
    return torch.stack(everyone)[: dist.get_rank(group)].sum(0)


def _ordered_keys(scores: Tensor) -> Tensor:
    """Map float32 scores to integers in [0, 2³²) in the same order; -0.0 and 0.0 share a key."""
    bits = torch.where(scores == 0, 0.0, scores).contiguous().view(torch.int32).long()
    return torch.where(bits < 0, ~bits, bits + 2**31)


def scores_of(keys: Tensor) -> Tensor:
    """Return the scores of keys, the inverse of `_ordered_keys`."""
    bits = torch.where(keys < 2**31, ~keys, keys - 2**31)
    return bits.to(torch.int32).view(torch.float32)

"""Exact selection: cuts, bounds and ties, on one rank and on many."""

from __future__ import annotations

import itertools
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from expert_threshold.routing import bounds, kth_largest, selection, take
from ranks import run_on_ranks

# Few values, so that ties abound; signed zeros, infinities, denormals and neighbours among them.
TIED = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-40, float("inf"), -float("inf"), 1.0000001, 3.4e38])
ANY = st.floats(width=32, allow_nan=False)


@st.composite
def score_matrices(draw: st.DrawFn, most_tokens: int = 12) -> Tensor:
    """Draw scores (pools, tokens, experts) with ties or without, contiguous, transposed or sliced from wider rows."""
    shape = tuple(draw(st.integers(1, n)) for n in (3, most_tokens, 3))
    some = torch.tensor(draw(st.lists(draw(st.sampled_from([TIED, ANY])), min_size=1, max_size=20)))
    scores = some.float()[torch.randint(len(some), shape, generator=torch.Generator().manual_seed(len(some)))]
    layout = draw(st.sampled_from(["rows", "columns", "part"]))
    if layout == "part":
        return scores.repeat_interleave(3, dim=2)[:, :, 1::3]
    return scores.mT.contiguous().mT if layout == "columns" else scores


@st.composite
def scores_and_ks(draw: st.DrawFn, most_tokens: int = 12) -> tuple[Tensor, list[int]]:
    scores = draw(score_matrices(most_tokens))
    return scores, draw(st.lists(st.integers(0, scores.shape[1]), min_size=1, max_size=4))


@given(scores_and_ks())
def test_selection_in_linear_time_agrees_with_the_definition(case: tuple[Tensor, list[int]]) -> None:
    sorting, quick = selection._kth_largest_by_sorting(*case), selection._kth_largest_in_linear_time(*case)
    assert all(torch.equal(a, b) for a, b in zip(sorting, quick, strict=True))


@pytest.mark.parametrize("shape", [(1, 5000, 3), (2, 4097, 2), (300, 5, 2), (1, 200_000, 2), (0, 5, 3), (2, 7, 0)])
def test_selection_in_blocks_agrees_with_the_definition(shape: tuple[int, int, int]) -> None:
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(100).round()
    ks = [shape[1] // 3, 1, 0, shape[1], shape[1] // 2]
    sorting, quick = selection._kth_largest_by_sorting(scores, ks), selection._kth_largest_in_linear_time(scores, ks)
    assert all(torch.equal(a, b) for a, b in zip(sorting, quick, strict=True))


@given(scores_and_ks())
def test_a_cut_takes_exactly_k_and_the_largest(case: tuple[Tensor, list[int]]) -> None:
    scores, ks = case
    for k, cut in zip(ks, kth_largest(scores, ks), strict=True):
        assert_taken(scores, take(scores, cut), torch.full((scores.shape[0], scores.shape[2]), k))


def assert_taken(scores: Tensor, taken: Tensor, counts: Tensor) -> None:
    """Check that the first `counts` (pools, experts) tokens of the order are taken, and no others."""
    for pool, expert in itertools.product(range(scores.shape[0]), range(scores.shape[2])):
        order = sorted(enumerate(scores[pool, :, expert].tolist()), key=lambda place: (-place[1], place[0]))
        first = sorted(index for index, _ in order[: int(counts[pool, expert])])
        assert taken[pool, :, expert].nonzero().flatten().tolist() == first


@given(score_matrices(), st.data())
def test_clamping_takes_as_many_as_the_bounds_allow_and_always_the_largest(scores: Tensor, data: st.DataObject) -> None:
    _, tokens, experts = scores.shape
    k_max = data.draw(st.integers(1, tokens))
    k_min = data.draw(st.integers(0, k_max))
    values = st.one_of(TIED, ANY, st.sampled_from(scores.flatten().tolist()))
    cutoff = torch.tensor(data.draw(st.lists(values, min_size=experts, max_size=experts)))
    at_least, at_most = kth_largest(scores, [k_min, k_max])
    taken = take(scores, selection.clamp(cutoff, at_least, at_most))
    assert_taken(scores, taken, (scores > cutoff).sum(1).clamp(k_min, k_max))


def test_scores_of_another_precision_are_no_scores() -> None:
    with pytest.raises(AssertionError, match="float32"):
        kth_largest(torch.zeros(1, 4, 2, dtype=torch.bfloat16), [1])


@pytest.mark.parametrize("ks", [[2], [3, 0, 5]])
def test_the_operator_is_fit_for_the_compiler(ks: list[int]) -> None:
    scores = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    torch.library.opcheck(selection._kth_largest, (scores, ks))
    torch.library.opcheck(selection._kth_largest, (scores.mT.contiguous().mT, ks))


# Bounds


@given(st.integers(1, 10**6), st.decimals("0.01", "8", places=2), st.integers(1, 64), st.decimals("0", "3", places=3))
def test_bounds_are_the_floors_of_the_decimals(tokens: int, fanout: Fraction, experts: int, slack: Fraction) -> None:
    k = Fraction(fanout) * tokens / experts // 1
    assume(0 < k <= tokens)
    assert bounds(tokens, float(fanout), experts, float(slack)) == (
        k,
        max(k * (1 - Fraction(slack)) // 1, 0),
        min(k * (1 + Fraction(slack)) // 1, tokens),
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((160, 1, 16, 0.9), (10, 1, 19)),  # 10 · (1 − 0.9) is 0.99… in binary
        ((100, 0.1, 1, 0.1), (10, 9, 11)),
        ((290, 0.1, 1, 0.0), (29, 29, 29)),  # 290 · 0.1 is 29.000000000000004
        ((70, 1.1, 1, None), (77, 0, 70)),
        ((160, 1, 16, 30), (10, 0, 160)),
        ((0, 1, 16, 0.5), (0, 0, 0)),
    ],
)
def test_bounds_by_hand(arguments: tuple[int, float, int, float | None], expected: tuple[int, int, int]) -> None:
    assert bounds(*arguments) == expected


# Across ranks


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_many_ranks_equal_one_and_send_no_more_for_more_tokens(ranks: int, tmp_path: Path) -> None:
    run_on_ranks(Path(__file__).with_name("across_ranks.py"), ranks, tmp_path)

"""Radix selection in Triton equals sorting, on a GPU or else in Triton's interpreter."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import no_waiting
from expert_threshold.routing import kth_largest, selection

triton = pytest.importorskip("triton", reason="the kernels are written in Triton")
from expert_threshold.routing import radix  # noqa: E402

from .test_selection import scores_and_ks  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_a_device = pytest.mark.skipif(
    DEVICE == "cpu" and isinstance(radix._take_digit, triton.JITFunction),
    reason="there is no GPU, and triton was imported without TRITON_INTERPRET=1",
)


def select(scores: Tensor, ks: list[int], tile: int = 64, tokens_per_copy: int = 16) -> tuple[Tensor, Tensor]:
    """Select with tiles and copies so small that a few tokens fill several of them."""
    with mock.patch.multiple(radix, TILE=tile, TOKENS_PER_COPY=tokens_per_copy):
        score, last = radix.select(scores.to(DEVICE), ks)
    return score.cpu(), last.cpu()


def assert_as_sorted(scores: Tensor, ks: list[int], **options: int) -> None:
    expected = selection._kth_largest_by_sorting(scores, ks)
    torch.testing.assert_close(select(scores, ks, **options), expected, rtol=0, atol=0, equal_nan=True)


@needs_a_device
@settings(max_examples=settings.default.max_examples // 5)
@given(scores_and_ks(40), st.sampled_from([16, 64, 2048]), st.sampled_from([1, 16]))
def test_the_cuts_are_those_that_sorting_finds(case: tuple[Tensor, list[int]], tile: int, per_copy: int) -> None:
    assert_as_sorted(*case, tile=tile, tokens_per_copy=per_copy)


@needs_a_device
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1), (1, 37, 17), (3, 33, 1), (1, 70, 33), (1, 2048, 1), (1, 5000, 1), (2, 0, 3), (0, 5, 3), (2, 7, 0)],
)
def test_no_shape_needs_to_fit_the_tiles(shape: tuple[int, int, int]) -> None:
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    assert_as_sorted(scores, [shape[1] * 2 // 3], tile=2048)


@needs_a_device
def test_nan_is_larger_than_all_as_in_sorting() -> None:
    scores = torch.tensor([1.0, float("nan"), float("inf"), -float("nan"), -2.0, float("nan")]).view(1, 6, 1)
    assert_as_sorted(scores, [2, 3, 4])


@needs_a_device
def test_it_is_what_selection_uses_where_there_are_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.randn(1, 30, 2, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    monkeypatch.setattr(selection, "_has_kernels", lambda _: True)
    monkeypatch.setattr(selection, "SORTED_AT_ONCE", 29)
    with mock.patch.object(radix, "select", wraps=radix.select) as called:
        kth_largest(scores, [3])
        kth_largest(scores[:, :29], [3])
    assert called.call_count == 1


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_the_host_waits_for_nothing_and_a_graph_can_hold_it() -> None:
    scores = torch.randn(1, 20_001, 16, device=DEVICE)
    ks = [1000, 500, 1500]
    expected = selection._kth_largest_by_sorting(scores, ks)
    radix.select(scores, ks)  # compiles
    with no_waiting():
        found = radix.select(scores, ks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = radix.select(scores, ks)
    graph.replay()
    for selected in (found, captured):
        torch.testing.assert_close(selected, expected, rtol=0, atol=0)

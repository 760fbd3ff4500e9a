"""Measures against values worked by hand, the paper's definitions written out, and what must hold for any routing."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from expert_threshold.analysis import measures

OVERLAPS = ["weighted_jaccard", "weighted_dice", "jaccard", "dice"]  # 1 if equal
DISTANCES = ["joint_jsd", "total_variation"]  # 0 if equal


def routed(*layers: list[set[int]], experts: int = 4) -> Tensor:
    """The assignment of a list of sets, one set a token, per layer."""
    return torch.tensor([[[expert in token for expert in range(experts)] for token in layer] for layer in layers])


@st.composite
def assignments(draw: st.DrawFn, count: int) -> list[Tensor]:
    """Assignments of one shape; sparse and empty ones are common."""
    shape = draw(st.tuples(*[st.integers(1, 4)] * 3))
    places = range(math.prod(shape))
    sets = st.integers(0, 2 ** len(places) - 1)
    bits, thinning = [draw(sets) for _ in range(count)], draw(sets) if draw(st.booleans()) else -1
    return [torch.tensor([bool(b & thinning & (1 << place)) for place in places]).view(shape) for b in bits]


# One layer of four tokens: equal sets, half shared, one of two, disjoint.
A = routed([{0, 1}, {0, 1}, {2}, {3}])
B = routed([{0, 1}, {1, 2}, {2, 3}, {0}])


def test_measures_of_two_assignments_have_the_values_worked_by_hand() -> None:
    assert measures.consistency(A, B) == pytest.approx(
        {
            "weighted_jaccard": 4 / 9,  # 4 edges in common of 6 + 7 − 4
            "weighted_dice": 8 / 13,
            "jaccard": (1 + 1 / 3 + 1 / 2 + 0) / 4,
            "dice": (1 + 1 / 2 + 2 / 3 + 0) / 4,
            # {2} against {2, 3}: M = (3/4, 1/4), ½·log2(4/3) + ½·(½·log2(2/3) + ½·log2(2)) = 3/4·log2(4/3)
            "joint_jsd": (0 + 1 / 2 + 0.75 * math.log2(4 / 3) + 1) / 4,
            "total_variation": (0 + 1 / 2 + 1 / 2 + 1) / 4,
        },
        abs=1e-12,
    )


def test_empty_sets_follow_the_papers_conventions() -> None:
    empty, some = routed([set(), set()]), routed([{1}, {0, 1, 2}])
    alike, apart, swapped = (
        measures.consistency(empty, empty),
        measures.consistency(empty, some),
        measures.consistency(some, empty),
    )
    for names, same in ((OVERLAPS, 1), (DISTANCES, 0)):
        assert all(alike[name] == same and apart[name] == swapped[name] == 1 - same for name in names)


@given(assignments(2))
def test_measures_are_symmetric_from_0_to_1_and_at_their_best_for_equal_assignments_alone(pair: list[Tensor]) -> None:
    a, b = pair
    there, back, alike = measures.consistency(a, b), measures.consistency(b, a), measures.consistency(a, a)
    assert there == pytest.approx(back, abs=1e-12)
    for names, same in ((OVERLAPS, 1), (DISTANCES, 0)):
        for name in names:
            assert -1e-12 <= there[name] <= 1 + 1e-12
            assert alike[name] == same
            assert (there[name] == pytest.approx(same, abs=1e-9)) == a.equal(b)


@given(assignments(2))
def test_divergences_are_those_of_the_distributions_written_out(pair: list[Tensor]) -> None:
    jsd, tv = [], []
    for a, b in zip(*(x.flatten(0, 1).double() for x in pair), strict=True):
        if not a.any() or not b.any():
            jsd.append(float(a.any() or b.any()))
            tv.append(jsd[-1])
            continue
        p, q = a / a.sum(), b / b.sum()
        m = (p + q) / 2
        kl = [(torch.xlogy(x, x) - torch.xlogy(x, m)).sum() / math.log(2) for x in (p, q)]
        jsd.append(float(sum(kl)) / 2)
        tv.append(float((p - q).abs().sum()) / 2)
    found = measures.consistency(*pair)
    assert found["joint_jsd"] == pytest.approx(sum(jsd) / len(jsd), abs=1e-12)
    assert found["total_variation"] == pytest.approx(sum(tv) / len(tv), abs=1e-12)


def test_expert_token_ratio_is_the_share_of_tokens_that_each_expert_got() -> None:
    assert measures.expert_token_ratio(A).tolist() == [[0.5, 0.5, 0.25, 0.25]]


def test_mutual_information_has_the_values_worked_by_hand() -> None:
    own_expert = torch.tensor([[0.5, 0.0], [0.0, 0.5]])
    blind = torch.tensor([[0.1, 0.3], [0.2, 0.6]])
    # Joint (½, 0; ¼, ¼): H(rows) = 1, H(columns) = h(¼), H(joint) = 1.5.
    half = torch.tensor([[2.0, 0.0], [1.0, 1.0]])
    h = -0.25 * math.log2(0.25) - 0.75 * math.log2(0.75)
    found = measures.mutual_information(torch.stack([own_expert, blind, half, torch.zeros(2, 2)]))
    assert found.tolist() == pytest.approx([1, 0, 1 + h - 1.5, 0], abs=1e-7)


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(st.floats(0, 9), min_size=n, max_size=n), min_size=1)))
@example([[2.225073858507203e-309]])  # below the smallest normal number
def test_mutual_information_is_symmetric_and_bounded_by_both_sides(rows: list[list[float]]) -> None:
    weights = torch.tensor(rows, dtype=torch.float64)
    bits = measures.mutual_information(weights).item()
    assert bits == pytest.approx(measures.mutual_information(weights.T).item(), abs=1e-9)
    assert 0 <= bits <= math.log2(min(weights.shape)) + 1e-9


def test_load_spread_has_the_values_worked_by_hand() -> None:
    loads = torch.tensor([[3, 3, 3, 3], [1, 1, 1, 5], [0, 0, 0, 12]])
    assert measures.load_spread(loads).tolist() == [1, 2.5, 4]
    assert measures.load_spread(torch.zeros(4, dtype=torch.int64)).isnan()


def test_the_routing_objective_adds_the_scores_of_what_is_assigned() -> None:
    scores = torch.tensor([[1.0, -2.0], [4.0, torch.inf]])
    assert measures.routing_objective(scores, torch.tensor([[True, True], [True, False]])) == 3


@pytest.mark.parametrize(
    ("tokens", "experts", "most", "load"),
    [(4, 2, 1, 2), (3, 3, 2, 2), (3, 3, 3, 3), (4, 3, 1, 1), (5, 2, 1, 2), (5, 2, 2, 1), (5, 2, 2, 3), (5, 2, 2, 0)],
)
def test_the_optima_are_the_best_of_all_assignments(tokens: int, experts: int, most: int, load: int) -> None:
    k = tokens * most // experts
    places = itertools.product([False, True], repeat=tokens * experts)
    every = [torch.tensor(place).view(tokens, experts) for place in places]
    choices = [z for z in every if (z.sum(0) == k).all()]
    both = [z for z in every if (z.sum(0) == load).all() and (z.sum(1) <= most).all()]
    for seed in range(3):
        scores = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))
        scores = scores.round() if seed == 2 else scores  # with ties
        (mine,) = measures.best_expert_choice(scores[None], k)
        assert measures.routing_objective(scores, mine) == max(measures.routing_objective(scores, z) for z in choices)
        mine = measures.best_token_choice(scores, most, load)
        best = max(measures.routing_objective(scores, z) for z in both)
        assert measures.routing_objective(scores, mine) == pytest.approx(best.item(), abs=1e-12)

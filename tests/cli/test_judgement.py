"""Methods against a baseline: paired differences, intervals, equivalence, and losses at equal FLOPs and seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from expert_threshold.analysis.records import Result
from expert_threshold.compare.judgement import judge, judged_cells, loss_at, used_until
from expert_threshold.compare.paired import corrected, holm, paired, residual_spread, student

Times = Sequence[float]


def result(method: str, seed: int, losses: list[Any], clock: Times = (), flops: Times = ()) -> Result:
    curve = [(10 * place, loss) for place, loss in enumerate(losses, start=1)]
    clock = clock or [float(place) for place in range(1, len(losses) + 1)]
    return Result(method, seed, losses[-1], 1.0, 1.0, 1.0, 1.0, 0.0, curve, clock, flops or clock, 1.0, 1.0, 0.0, 0.0)


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_students_quantiles_are_scipys(freedom: int, confidence: float) -> None:
    from scipy import stats

    assert student(confidence, freedom) == pytest.approx(stats.t.ppf(0.5 + confidence / 2, freedom), rel=1e-8)


def test_the_interval_is_that_of_a_paired_test() -> None:
    from scipy import stats

    values = [0.01, 0.03, -0.005, 0.02]
    found = paired(values, 0.01)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([0.050, 0.052, 0.049], "higher"),
        ([-0.050, -0.052, -0.049], "lower"),
        ([0.001, -0.001, 0.000], "equivalent"),
        ([0.004, 0.0041, 0.0042], "equivalent"),  # surely not 0, and surely within the margin
        ([0.05, -0.05, 0.02], "open"),
        ([0.5], "open"),
    ],
)
def test_a_verdict_is_given_only_where_the_runs_decide(values: list[float], verdict: str) -> None:
    assert paired(values, 0.01).verdict == verdict


def test_equivalence_errs_at_most_as_often_as_stated() -> None:
    """With the true difference at the margin, at most 5 % of samples may be called equivalent."""
    random = np.random.default_rng(0)
    samples = 0.01 + 0.004 * random.standard_normal((1000, 3))
    wrong = sum(paired(sample.tolist(), 0.01).verdict == "equivalent" for sample in samples)
    assert wrong / 1000 < 0.05 + NormalDist().inv_cdf(0.999) * math.sqrt(0.05 * 0.95 / 1000)


def test_corrected_verdicts_have_holms_probabilities() -> None:
    """By hand: 0.01 · 3, then 0.02 · 2, then 0.03 · 1, which may not be less than its predecessor."""
    assert holm([0.03, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.9, 0.8]) == [1, 1]


def test_the_spread_of_few_seeds_is_pooled_over_methods_as_in_an_analysis_of_variance() -> None:
    from scipy import stats

    losses = np.array([[3.0, 3.1, 3.3], [2.9, 3.05, 3.2], [3.2, 3.25, 3.5], [3.0, 3.2, 3.25]])
    spread, freedom = residual_spread(losses.tolist())
    methods, seeds = losses.shape
    total = ((losses - losses.mean()) ** 2).sum()
    within = total - seeds * losses.mean(1).var() * methods - methods * losses.mean(0).var() * seeds
    assert freedom == (methods - 1) * (seeds - 1) == 6
    assert spread == pytest.approx(math.sqrt(within / freedom))
    rows = corrected((losses[1:] - losses[0]).tolist(), 0.01)
    error = spread * math.sqrt(2 / seeds)
    means = losses[1:].mean(1) - losses[0].mean()
    probabilities = holm([2 * stats.t.sf(abs(mean) / error, freedom) for mean in means])
    assert all((row.error, row.freedom) == pytest.approx((error, 6)) for row in rows)
    assert [row.verdict == "open" for row in rows] == [p > 0.05 for p in probabilities]
    many = corrected(np.repeat(losses[1:] - losses[0], 2, axis=1).tolist(), 0.01)
    assert [row.freedom for row in many] == [5, 5, 5]  # six seeds are enough for each method's own spread
    *few, alone = corrected([*(losses[1:3] - losses[0]).tolist(), [0.1, 0.2]], 0.01)
    assert [row.freedom for row in (*few, alone)] == [4, 4, 1]  # a method with fewer seeds than the others has its own


def test_differences_are_of_the_same_seed_and_methods_without_one_in_common_are_left_out() -> None:
    """The spread between seeds, 1 nat, cancels."""
    losses = {0: 3.0, 1: 4.0, 2: 5.0}
    runs = [result("base", seed, [9, loss]) for seed, loss in losses.items()]
    runs += [result("other", seed, [9, losses[seed] - 0.1 - seed / 1000]) for seed in (2, 0, 1)]
    base, other = judge(runs, "base")
    assert base.difference is None
    assert other.difference.mean == pytest.approx(-0.101)
    assert other.difference.verdict == "lower"
    assert [row.method for row in judge([result("base", 0, [1]), result("other", 1, [1])], "base")] == ["base"]


def test_at_equal_flops_and_seconds_the_cheaper_run_of_a_pair_sets_the_limit() -> None:
    slow = result("slow", 0, [4, 3, 2], clock=[2, 4, 6], flops=[80, 120, 200])
    base = result("base", 0, [5, 4, 3], clock=[1, 2, 3], flops=[30, 60, 100])
    quick = result("quick", 0, [5, 5], clock=[0.1, 0.2], flops=[0.5, 1])
    _, row, _ = judge([base, slow, quick], "base")
    assert row.at_flops.mean == pytest.approx(3.5 - 3)  # 100 FLOPs lie between the first two validations, at 80 and 120
    assert row.at_seconds.mean == pytest.approx(3.5 - 3)
    assert row.seconds_to_loss == 4  # 3.0 at the second validation
    assert judge([base, slow], "base", timed=False)[1].at_seconds is None


def test_a_loss_before_the_first_validation_is_unknown() -> None:
    run = result("x", 0, [4.0, 3.0])
    assert loss_at(run, [1, 2], 0.5) is None
    assert [loss_at(run, [1, 2], limit) for limit in (1, 1.5, 2, 9)] == [4, 3.5, 3, 3]
    assert [used_until([(1, 4.0), (2, 3.0)], goal) for goal in (9, 4, 3.5, 3, 2)] == [1, 1, 1.5, 2, None]


def test_a_loss_that_is_not_finite_leaves_its_differences_out() -> None:
    runs = [result("base", seed, [4.0, 3.0]) for seed in (0, 1)] + [result("other", 0, [4.0, None])]
    _, row = judge([*runs, result("other", 1, [4.0, 3.0])], "base")
    assert row.difference is row.corrected is row.seconds_to_loss is None
    assert judged_cells([row], "base")[0][1:3] == ["–", "–"]
    diverged = result("other", 0, [4.0, None], clock=[1.0, 1.0])  # nothing was logged after the validation
    _, row = judge([result("base", 0, [4.0, 3.0]), diverged], "base")
    assert row.at_flops is row.at_seconds is None

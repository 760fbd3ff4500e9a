"""Experts over several processes: what each rank checks is in across_ranks.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from expert_threshold.moe.sharding import split_rows
from expert_threshold.routing import ExpertChoice, ExpertThreshold, Rule, TokenChoice
from ranks import run_on_ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_on_several_ranks_equal_those_of_one_process(ranks: int, tmp_path: Path) -> None:
    run_on_ranks(Path(__file__).with_name("across_ranks.py"), ranks, tmp_path)


@pytest.mark.parametrize(
    ("rule", "rows"),
    [
        (ExpertChoice(8, 1, pool="batch"), 2 * 8),
        (ExpertChoice(8, 1, pool="sequence"), 2 * 2 * 4),
        (ExpertThreshold(8, 1, pool=16, capacity_slack=0.5), 2 * 4 * 3),
        (ExpertThreshold(8, 4, pool="batch"), 64),
    ],
)
def test_equal_splits_hold_what_the_bounds_let_through(rule: Rule, rows: int) -> None:
    assert split_rows(rule, (2, 32), 4) == rows


@pytest.mark.parametrize(
    "rule",
    [
        TokenChoice(8, 1),
        ExpertThreshold(8, 1, capacity_slack=None),
        ExpertThreshold(8, 1),  # a global pool bounds the load from all ranks together
        ExpertChoice(8, 1, pool="global"),
    ],
)
def test_equal_splits_are_refused_where_nothing_bounds_them(rule: Rule) -> None:
    with pytest.raises(ValueError, match=r"does not bound an expert's load from one rank.*use splits by count"):
        split_rows(rule, (2, 32), 4)

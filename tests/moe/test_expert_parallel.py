"""Experts over several processes: what each rank checks is in across_ranks.py."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from expert_threshold.moe import Experts
from expert_threshold.moe.backends.expert_parallel import OwnExperts
from expert_threshold.moe.sharding import equal_split
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
    assert equal_split(rule, (2, 32), 4).rows == rows


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
        equal_split(rule, (2, 32), 4)


@pytest.mark.parametrize("training", [True, False])
def test_an_owner_knows_the_bound_on_its_pairs_in_training_and_need_not_wait_to_count_them(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With equal splits each layer still waited for the device once."""
    monkeypatch.setitem(OwnExperts.__init__.__globals__, "part", lambda tensor, group: tensor)
    backend = mock.Mock()
    split = equal_split(ExpertChoice(8, 1, pool="batch"), (2, 32), 4)
    own = OwnExperts(Experts(2, 4, 4), backend, mock.Mock(), split).train(training)
    own(torch.empty(64, 4), torch.empty(64, 2), torch.empty(64, 2))
    assert backend.call_args.kwargs["rows"] == (8 * 8 if training else None)

"""Experts over several processes: what each rank checks is in across_ranks.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks import run_on_ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_on_several_ranks_equal_those_of_one_process(ranks: int, tmp_path: Path) -> None:
    run_on_ranks(Path(__file__).with_name("across_ranks.py"), ranks, tmp_path)

"""Runs of several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks import run_on_ranks

from .across_ranks import text


@pytest.mark.parametrize("ranks", [2, 4])
def test_several_ranks_equal_one_with_the_same_global_batch(ranks: int, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text(text())
    run_on_ranks(Path(__file__).with_name("across_ranks.py"), ranks, tmp_path)

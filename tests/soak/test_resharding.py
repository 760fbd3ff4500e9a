"""A run may go on with any number of ranks, in any layout: its losses stay the same, and so does what it trains on."""

from __future__ import annotations

from pathlib import Path

import pytest

import campaign
from ranks import run_on_ranks
from train.across_ranks import text


@pytest.mark.timeout(3600)
@campaign.trials(20)
def test_losses_and_samples_stay_the_same_through_four_random_layouts(trials: int, tmp_path: Path) -> None:
    """1, 2 or 4 ranks, experts or parameters split or whole; losses and weights within 1e-5, no row twice or never."""
    (tmp_path / "corpus.jsonl").write_text(text())
    try:
        run_on_ranks(Path(__file__).with_name("reshard.py"), 4, tmp_path, str(trials))
    finally:
        done = int((tmp_path / "done").read_text()) if (tmp_path / "done").exists() else 0
        campaign.done["resharding"] = trials, trials - done

"""Training on shards, which stream."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cases import write_shards
from expert_threshold.data import Tokenizer, loader
from expert_threshold.runs import RunFolder

from .conftest import Start
from .test_loop import assert_same_run, forget_after, metrics

TEXTS = [f"Shard text {number}: " + "the model reads and learns. " * (number % 5 + 1) for number in range(120)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several in a run of a few steps."""
    monkeypatch.setattr(loader, "BLOCK_BYTES", 500)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Three shards of 40 documents, the last for validation."""
    return write_shards(tmp_path / "shards", TEXTS, row_group_size=4)


def test_a_run_on_shards_that_was_resumed_equals_one_that_never_stopped(start: Start, tmp_path: Path) -> None:
    start("whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "halves")
    forget_after(tmp_path / "halves", 4)
    start("halves", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "halves")
    position = RunFolder.open(tmp_path / "whole").load_checkpoint(4).state["position"]
    assert position["block"] > 0


def test_a_tokenizer_beside_shards_is_used_if_of_the_models_size(start: Start, tmp_path: Path, corpus: Path) -> None:
    for vocab_size in (300, 290):
        beside = Tokenizer.train(TEXTS[:60], vocab_size)
        beside.save(corpus / "tokenizer.json")
        name = f"run{vocab_size}"
        start(name, steps=1)
        assert (RunFolder.open(tmp_path / name).tokenizer().hash == beside.hash) == (vocab_size == 300)


def test_validation_reads_no_more_than_it_evaluates(start: Start, tmp_path: Path) -> None:
    start(eval_tokens=64)
    assert metrics(tmp_path / "run", "validation")[-1]["tokens"] == 64

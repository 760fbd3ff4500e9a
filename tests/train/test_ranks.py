"""Runs of several ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from expert_threshold.runs import RunFolder
from ranks import run_on_ranks

from .across_ranks import text


@pytest.mark.parametrize("ranks", [2, 4])
def test_several_ranks_equal_one_with_the_same_global_batch(ranks: int, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text(text())
    run_on_ranks(Path(__file__).with_name("across_ranks.py"), ranks, tmp_path)


SIZES = "--layers 2 --d-model 32 --heads 2 --kv-heads 2 --d-expert 32 --vocab-size 300 --context 16 --num-experts 4"
USUAL = "--steps 8 --batch-size 4 --accumulation 1 --checkpoint-every 3 --eval-every none --threads 1 --log-every 1"


def torchrun(script: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    """Two ranks of `python SCRIPT` under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2",
    }  # fmt: skip
    return subprocess.run(
        [*command, *options, *script], env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def failing(what: str, rank: int, step: int, folder: Path, *more: str) -> list[str]:
    (folder / "corpus.jsonl").write_text(text())
    train = f"train tiny {SIZES} {USUAL} --data {folder / 'corpus.jsonl'} --out {folder / 'run'}".split()
    return [str(Path(__file__).with_name("failing.py")), what, str(rank), str(step), *train, *more]


def said(result: subprocess.CompletedProcess[str]) -> list[str]:
    """Lines of ours, and not torchrun's."""
    return [line for line in result.stderr.splitlines() if line.startswith("et train: ")]


@pytest.mark.soak
def test_a_run_whose_rank_is_killed_says_so_and_goes_on_by_itself_where_the_launcher_restarts(tmp_path: Path) -> None:
    result = torchrun(failing("killed", 1, 5, tmp_path), "--max-restarts", "1")
    assert result.returncode == 0, result.stderr
    assert said(result) == [
        f"et train: rank 1 of 2 ended or no longer answered; to go on: et train --resume {tmp_path / 'run'}"
    ]
    folder = RunFolder.open(tmp_path / "run")
    assert folder.checkpoints() == [3, 6, 8]
    assert [record["step"] for record in folder.metrics.read()] == list(range(1, 9))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("hung", r"rank 1 of 2 ended or no longer answered; to go on: et train --resume .*/run"),
        ("raising", r"rank 1: ZeroDivisionError: by zero"),
        ("full", r"rank 1: .*_of_rank_1.safetensors: File too large; .*"),
    ],
)
def test_what_goes_wrong_on_one_rank_ends_all_with_one_line_and_harms_nothing_saved(
    what: str, line: str, tmp_path: Path
) -> None:
    result = torchrun(failing(what, 1, 5, tmp_path, "--timeout", "5"))
    assert result.returncode != 0
    [told] = said(result)
    assert re.fullmatch(f"et train: {line}", told)
    folder = RunFolder.open(tmp_path / "run")
    assert folder.load_checkpoint().step == 3

"""Runs of several ranks."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from expert_threshold.cli import main
from expert_threshold.cli.train import _resumed
from expert_threshold.config import RunConfig
from expert_threshold.data import DataConfig
from expert_threshold.model import GPTConfig
from expert_threshold.optim import OptimConfig
from expert_threshold.runs import RunFolder
from expert_threshold.train import TrainConfig
from ranks import run_on_ranks

from .across_ranks import text


@pytest.mark.parametrize(("ranks", "which"), [(2, "few"), (4, "few"), pytest.param(2, "all", marks=pytest.mark.soak)])
def test_several_ranks_equal_one_with_the_same_global_batch(ranks: int, which: str, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text(text())
    run_on_ranks(Path(__file__).with_name("across_ranks.py"), ranks, tmp_path, which)


SOAK = pytest.mark.soak
SIZES = (
    "--layers 2 --d-model 32 --model.heads 2 --model.kv-heads 2 --model.d-expert 32 --vocab-size 300 --context 16 "
    "--num-experts 4"
)
USUAL = "--steps 8 --batch-size 4 --accumulation 1 --checkpoint-every 3 --eval-every none --threads 1 --log-every 1"


def torchrun(*script: str) -> subprocess.CompletedProcess[str]:
    """Two ranks of `python SCRIPT`; options of torchrun may come first."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", *script]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def tiny_run(folder: Path) -> list[str]:
    (folder / "corpus.jsonl").write_text(text())
    return f"train tiny {SIZES} {USUAL} --data {folder / 'corpus.jsonl'} --out {folder / 'run'}".split()


def failing(what: str, rank: int, step: int, folder: Path, *more: str) -> list[str]:
    return [str(Path(__file__).with_name("failing.py")), what, str(rank), str(step), *tiny_run(folder), *more]


def said(result: subprocess.CompletedProcess[str]) -> list[str]:
    """Lines of ours, and not torchrun's."""
    return [line for line in result.stderr.splitlines() if line.startswith("et train: ")]


@pytest.mark.parametrize(("ranks", "split"), [(1, 1), (2, 2), (3, 1), (4, 4), (6, 2), (8, 4)])
def test_a_resumed_run_splits_experts_as_before_as_far_as_ranks_allow(ranks: int, split: int, tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    config = RunConfig(GPTConfig(), DataConfig("corpus.jsonl"), OptimConfig(), TrainConfig(expert_parallel=4))
    run.write_config(config.to_dict())
    assert _resumed(run, {}, ranks).train.expert_parallel == split
    assert _resumed(run, {"train.expert_parallel": 3}, ranks).train.expert_parallel == 3


@pytest.mark.soak
def test_a_run_whose_rank_is_killed_says_so_and_goes_on_by_itself_where_the_launcher_restarts(tmp_path: Path) -> None:
    result = torchrun("--max-restarts", "1", *failing("killed", 1, 5, tmp_path))
    assert result.returncode == 0, result.stderr
    assert said(result) == [
        f"et train: rank 1 of 2 exited or stopped responding; continue: et train --resume {tmp_path / 'run'}"
    ]
    folder = RunFolder.open(tmp_path / "run")
    assert folder.checkpoints() == [3, 6, 8]
    assert [record["step"] for record in folder.metrics.read()] == list(range(1, 9))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("hung", r"timed out: rank 1 of 2 did not answer; continue: et train --resume .*/run; .*"),
        ("raising", r"rank 1: ZeroDivisionError: by zero"),
        ("full", r"rank 1: .*_of_rank_1.safetensors: File too large; .*"),
    ],
)
def test_a_failure_of_one_rank_ends_all_with_one_line_and_harms_nothing(what: str, line: str, tmp_path: Path) -> None:
    result = torchrun(*failing(what, 1, 5, tmp_path, "--train.timeout", "20"))
    assert result.returncode != 0
    [told] = said(result)
    assert re.fullmatch(f"et train: {line}", told)
    folder = RunFolder.open(tmp_path / "run")
    assert folder.load_checkpoint().step == 3
    assert main(["train", "--resume", str(folder.path)]) == 0
    assert folder.checkpoints() == [3, 6, 8]


# Keeps the exit code of each rank, whatever the launcher makes of it.
KEPT = """
    trap : TERM; cd "$CODES/$RANK"; [ $RANK = 1 ] && set -- "$@" $ONLY
    "$0" -m expert_threshold "$@"; code=$?; echo $code > "$CODES/code_$RANK"; exit $code
"""


@pytest.mark.parametrize(
    ("options", "only", "lost", "line"),
    [
        ("--batch-size 3", "", 0, "train.batch_size=3 is not divisible by 2 ranks; .*"),
        ("", "--eval-tokens 512", 0, "rank 1 differs from rank 0: train.eval_tokens is 512, not its default; .*"),
        ("", "", 1, "rank 1 differs from rank 0: text is '.*', not '.*'; .*"),
        pytest.param(
            "--num-experts 3 --train.expert-parallel 2", "", 0, "num_experts=3 cannot be split .*", marks=SOAK
        ),
    ],
)
def test_bad_input_ends_all_ranks_with_one_line_and_exit_code_2(
    options: str, only: str, lost: int, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """only: options of rank 1 alone. lost: documents that it lacks."""
    monkeypatch.setenv("CODES", str(tmp_path))
    monkeypatch.setenv("ONLY", only)
    command = [word.replace(f"{tmp_path}/corpus", "corpus") for word in tiny_run(tmp_path)]
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "corpus.jsonl").write_text("".join(text().splitlines(True)[lost * rank :]))
    result = torchrun("--no-python", "sh", "-c", KEPT, sys.executable, *command, *options.split())
    assert result.returncode != 0
    [told] = said(result)
    assert re.fullmatch(f"et train: {line}", told)
    assert [(tmp_path / f"code_{rank}").read_text() for rank in range(2)] == ["2\n", "2\n"]
    assert not (tmp_path / "run").exists()


def test_ranks_whose_launcher_is_killed_stop_and_save(tmp_path: Path) -> None:
    """They trained on to the last step, and could not save then."""
    line = " ".join(tiny_run(tmp_path)).replace("--steps 8", "--steps 100000 --nproc 2")
    command = [sys.executable, "-m", "expert_threshold", *line.replace("--checkpoint-every 3", "").split()]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    folder = RunFolder(tmp_path / "run")
    while not folder.metrics.read():  # the empty file is there before the first step
        time.sleep(0.1)
    launcher.kill()
    out, _ = launcher.communicate()  # until the ranks exit
    saved = folder.load_checkpoint().step
    assert saved % 250 > 0  # no step at which it would have saved anyway
    assert f"stopped at step {saved} of 100000; to continue" in out

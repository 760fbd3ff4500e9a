"""`et compare` and `et sweep` fill a folder with runs, and the same command continues it: one contract for both."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

from cases import et, said
from commands import Experiment, Options, Refused, edit, interrupt_at
from expert_threshold.compare import running, sweep
from expert_threshold.data import Tokenizer
from expert_threshold.install import install
from expert_threshold.train import device

FEWER = {"compare": ["--rules", "token_choice", "--seeds", 1], "sweep": ["--methods", "expert_threshold"]}
MORE: dict[str, Options] = {"compare": ["--seeds", 3], "sweep": ["--trials", 4]}
OTHER: dict[str, dict[str, str]] = {
    "compare": {
        "--steps 8": "steps=8 differs from 4",
        "--layers 2": "layers=2 differs from 3",
        "--matrix-lr 0.5": "matrix_lr=0.5 differs from 0.02",
        "--data.text-field body": "data.text_field='body' differs from 'text'",
        "--rule.warmup-steps 2": "warmup_steps=2 differs from 0",
        "--rules token_choice_aux --context 16": "context=16 differs from 32",
    },
    "sweep": {
        "--steps 8": "steps=8 differs from 4",
        "--seeds 2": "seeds=2 differs from 1",
        "--space optim.head_lr=0.1..0.2": "space=",
    },
}


@pytest.fixture(params=["comparison", "search"])
def made(request: pytest.FixtureRequest) -> Experiment:
    experiment: Experiment = request.getfixturevalue(request.param)
    return experiment


@pytest.fixture
def copy(made: Experiment, tmp_path: Path) -> Experiment:
    return made.copy(tmp_path / "copy")


@pytest.mark.parametrize(("made", "step"), [("comparison", 7), ("search", 2), ("search", 19)], indirect=["made"])
def test_interrupted_in_any_run_and_repeated_it_equals_one_that_never_stopped(
    made: Experiment, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    again = made._replace(out=tmp_path / "a folder")
    with monkeypatch.context() as patch:
        interrupt_at(step, patch)
        assert et(*again.command) == 130
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("to continue the ")]
    assert f": et {made.name} tiny --data" in line
    assert line.endswith(f"--out '{again.out}'")
    assert et(*again.command) == 0
    assert again.record == made.record
    assert again.metrics == made.metrics


def test_what_is_finished_is_only_shown_again_also_in_part_and_without_matplotlib(
    copy: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = copy.record, copy.metrics
    (page,) = copy.out.glob("*.html")
    page.unlink()
    for path in copy.out.glob("*/*/checkpoints"):
        shutil.rmtree(path)
    monkeypatch.setattr(running, "train_run", None)
    monkeypatch.setattr(sweep, "train", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for options in ([], FEWER[copy.name]):
        assert install("viz") in said(*copy.command, *options)
        assert (copy.record, copy.metrics) == before
        assert not page.exists()


def test_other_options_are_refused(copy: Experiment, refused: Refused) -> None:
    for options, words in OTHER[copy.name].items():
        refused([*copy.command, *options.split()], words, "differs from", str(copy.out), "use another --out")


def test_more_runs_have_the_dtype_and_the_tokenizer_of_the_first(
    copy: Experiment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [config["train"]["dtype"] for config in copy.configs]
    other_dtype = torch.bfloat16 if before[0] == "float32" else torch.float32
    monkeypatch.setattr(device, "fast_dtype", lambda _: other_dtype)  # another machine
    assert et(*copy.command, *MORE[copy.name]) == 0
    after = [config["train"]["dtype"] for config in copy.configs]
    assert len(after) > len(before)
    assert set(after) == {before[0]}
    other = Tokenizer([*map(bytes, zip(range(256), strict=True)), *(bytes([n, n]) for n in range(13))])
    if copy.name == "compare":
        other.save(copy.out / "dense" / "seed_0" / "tokenizer.json")
    else:
        with edit(copy.out / "sweep.json") as record:
            record["text"]["tokenizer"] = other.hash
    assert et(*copy.command, MORE[copy.name][0], 5) == 2
    assert "the tokenizer of " in capsys.readouterr().err
    assert len(copy.configs) == len(after)


def test_a_folder_of_something_else_is_refused(made: Experiment, refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("{}")
    refused(made._replace(out=tmp_path).command, str(tmp_path), "use another --out")

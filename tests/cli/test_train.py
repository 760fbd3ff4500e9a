"""`et train`: what it prints, starts, resumes and refuses, and what it never harms."""

from __future__ import annotations

import errno
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import et, resolved, said
from commands import Options, Refused, content, edit
from expert_threshold.cli import train as train_command
from expert_threshold.config import resolve, run_config
from expert_threshold.moe import BACKENDS
from expert_threshold.routing import ExpertThreshold, TokenChoice
from expert_threshold.runs import RunFolder
from expert_threshold.train import train_step
from expert_threshold.train.budget import SHARE_OF_STEPS

LAST = "checkpoints/step_000004/model.safetensors"


def test_a_run_of_some_minutes_has_the_steps_that_fit(
    small: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("expert_threshold.train.pace._seconds_of_step", lambda state: train_step(state) and 0.5)
    monkeypatch.setattr("expert_threshold.train.pace.SECONDS", 0)
    monkeypatch.setattr("expert_threshold.train.evaluations.now", lambda: 0.0)  # no time passes: no decisions
    monkeypatch.setattr("expert_threshold.train.budget.ENOUGH", 1000)
    assert et("train", *small, "--minutes", 0.1, "--out", tmp_path / "run") == 0
    config = RunFolder.open(tmp_path / "run").config
    assert config["train"]["steps"] == round(6 / 0.5 * SHARE_OF_STEPS)
    assert config["rule"]["warmup_steps"] == config["train"]["steps"] // 5  # of the run as it became
    assert config["time"] == {"minutes": 0.1, "decisions": []}


def test_training_prints_its_plan_and_the_next_command(
    small: Options, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a run"
    assert et("train", *small, "--steps", 2, "--sample-every", 2, "--out", out) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "rule expert_threshold among 16 experts" in shown.out
    assert "2 steps of 64 tokens" in shown.out
    assert ", 1 thread\n" in shown.out
    assert "bits per byte" in shown.out
    assert "prompt 'def read'" in shown.out
    (last,) = (line for line in shown.out.splitlines() if line.startswith("next: "))
    program, command, folder, *sampling = shlex.split(last.removeprefix("next: "))
    assert (program, command, folder) == ("et", "generate", str(out))
    assert et("generate", out, "--max-tokens", 1, *sampling) == 0
    assert f"explorer: et serve {shlex.quote(str(out))}\n" in shown.out
    assert [path.name for path in (out / "samples").iterdir()] == ["step_000002.txt"]
    assert f"report: {out / 'report.html'}" in shown.out
    assert "<h1>Expert threshold (ET" in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("drawn")
def test_a_report_that_fails_loses_nothing_but_itself(
    small: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "run"
    assert et("train", *small, "--steps", 1, "--out", out) == 0
    shown = capsys.readouterr()
    (warning,) = (line for line in shown.out.splitlines() if line.startswith("warning"))
    assert "matplotlib" in warning
    assert "report: " not in shown.out
    assert f"next: et generate {out}" in shown.out
    assert RunFolder.open(out).latest_checkpoint() == 1
    assert not (out / "report.html").exists()


def test_the_config_of_a_run_repeats_it(run: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    assert et("train", "--config", run / "config.json", "--out", again) == 0
    model = RunFolder.open(run).load_checkpoint().tensors["model"]
    repeated = RunFolder.open(again).load_checkpoint().tensors["model"]
    assert all(torch.equal(model[name], repeated[name]) for name in model)


@pytest.fixture
def part(copy: Path) -> Path:
    """A run with two of its four steps left to train."""
    shutil.rmtree(copy / "checkpoints" / "step_000004")
    return copy


def test_a_run_is_resumed_from_its_folder_alone(run: Path, part: Path) -> None:
    assert et("train", "--resume", part, "--log-every", 1) == 0
    assert content(part)[LAST] == content(run)[LAST]


def test_a_run_whose_text_lies_elsewhere_is_resumed(
    run: Path, part: Path, text: Path, refused: Refused, tmp_path: Path
) -> None:
    with edit(part / "config.json") as config:
        config["data"]["source"] = str(tmp_path / "gone")
    refused(["train", "--resume", part], f"{tmp_path / 'gone'} does not exist", "--data")
    other = tmp_path / "other.jsonl"
    other.write_text("".join(text.read_text().splitlines(keepends=True)[1:]))
    refused(["train", "--resume", part, "--data", other], "has changed", "--data")
    assert et("train", "--resume", part, "--data", text) == 0
    assert RunFolder.open(part).config["data"] == RunFolder.open(run).config["data"]
    assert content(part)[LAST] == content(run)[LAST]


def test_a_run_without_its_checkpoints_is_not_trained_again(copy: Path, refused: Refused) -> None:
    shutil.rmtree(copy / "checkpoints")
    refused(["train", "--resume", copy], f"{copy / 'checkpoints'} is missing or empty", "copy")
    (copy / "report.html").unlink()  # like a run killed before its first checkpoint
    assert et("train", "--resume", copy) == 0
    assert content(copy)[LAST]


def test_a_resumed_run_reports_that_it_keeps_its_threads(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "as before" not in said("train", "--resume", copy)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert "using 1 thread as before" in said("train", "--resume", copy)
    assert "as before" not in said("train", "--resume", copy, "--threads", 1)


def test_a_run_begins_with_another_ones_model(text: Path, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "next"
    options = ["--data", text, "--batch-size", 2, "--steps", 1, "--seed", 5, "--rule", "token_choice", "--threads", 1]
    assert et("train", "tiny", "--init-from", run, *options, "--out", out) == 0
    config = run_config(RunFolder.open(out).config)
    assert config.model.context == 32
    assert config.model.rule == TokenChoice()
    assert RunFolder.open(out).config["init_from"] == str(run)


@pytest.mark.parametrize("preset", ["d12", "tiny"])
def test_a_run_begun_from_another_has_the_rule_of_its_own_length(preset: str, tmp_path: Path) -> None:
    """Regression: its warmup, decay and estimator had the other run's length."""
    first = tmp_path / "first"
    RunFolder.create(first).write_config(resolve(preset).to_dict())

    def rule(options: str = "") -> ExpertThreshold:
        return resolved(f"--init-from {first} --steps 500 {options}").model.rule  # type: ignore[return-value]

    for options in ("", "--no-rule.debias", "--rule.estimator mean", "--rule.warmup-steps 30 --rule.decay 0.5"):
        assert rule(options) == resolved(f"--steps 500 {options}").model.rule
    RunFolder.open(first).write_config(resolve(preset, recipe="expert_threshold_no_warmup").to_dict())
    assert rule().estimator == ("mean" if preset == "tiny" else "trend")  # for tiny, the mean was a choice
    with pytest.raises(ValueError, match="warmup_steps=600 is longer than the run of 500 steps"):
        rule("--rule.warmup-steps 600")


def test_the_folder_of_a_run_is_named_after_preset_and_rule(
    small: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert et("train", *small, "--steps", 1, "--rule", "dense") == 0
    assert (tmp_path / "runs" / "tiny-dense" / "config.json").is_file()


def test_an_export_with_a_damaged_option_is_not_imported(run: Path, refused: Refused, tmp_path: Path) -> None:
    exported = tmp_path / "exported"
    assert et("export", run, "--to", exported) == 0
    with edit(exported / "config.json") as config:
        config["d_model"] = "x"
    refused(["import", exported, "--out", tmp_path / "new"], f"{exported / 'config.json'}: d_model='x'", "at least 1")


def test_a_full_disk_is_reported_and_what_was_saved_stays(
    small: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save = RunFolder.save_checkpoint

    def fill_up(folder: RunFolder, step: int, *arguments: Any, **options: Any) -> None:
        if step > 2:
            raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")
        save(folder, step, *arguments, **options)

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save_checkpoint", fill_up)
        assert et("train", *small, "--steps", 4, "--out", out) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "model.safetensors: No space left on device" in line
    assert "--resume" in line
    assert RunFolder.open(out).load_checkpoint().step == 2
    assert et("train", "--resume", out) == 0


def test_a_dispatch_that_cannot_run_here_is_refused_before_anything_is_written(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BACKENDS["triton"], "why_not", lambda *_: "needs a CUDA GPU")
    train = ["train", "tiny", "--model.dispatch", "triton", "--out", tmp_path / "run"]
    refused(train, "dispatch='triton' needs a CUDA GPU")


@pytest.mark.parametrize(
    ("rule", "accumulation", "told"),
    [
        ("expert_choice", 1, True),
        ("expert_choice", 4, False),
        ("expert_choice --rule.pool 256", 1, False),
        ("token_choice --rule.balance aux", 1, True),
        ("expert_threshold", 1, False),
        ("dense", 1, False),
    ],
)
def test_ranks_that_give_a_rule_smaller_pools_are_told(rule: str, accumulation: int, told: bool) -> None:
    config = resolved(f"tiny --rule {rule} --accumulation {accumulation}")
    said = train_command.introduce(config, 2)
    assert ("uses pools of 1,024 tokens on each rank, not 2,048 as in a single process" in said) == told
    assert "on each rank" not in train_command.introduce(config, 1)

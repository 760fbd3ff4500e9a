"""CORE during training: when it is asked, what is written, and that nothing else changes by it."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cases import write_bundle
from expert_threshold.distributed import Status
from expert_threshold.evaluation import ModelScorer, centred, evaluate_task, read_bundle
from expert_threshold.runs import RunFolder, load_model
from expert_threshold.train.evaluations import Evaluations

from .conftest import Plain, Start
from .test_loop import assert_same_checkpoint, assert_same_run, forget_after, metrics


@pytest.fixture(autouse=True)
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The bundle that was downloaded."""
    monkeypatch.setenv("EXPERT_THRESHOLD_CACHE", str(tmp_path))
    copy = [{"context": f"the {i}", "continuation": f"the {i}"} for i in range(6)]
    both = [["the model", f"a token {i}"] for i in range(6)]
    who = [{"context_options": two, "continuation": "reads text", "gold": i % 2} for i, two in enumerate(both)]
    return write_bundle(tmp_path / "core", {"copy": ("language_modeling", 1, 0, copy), "who": ("schema", 0, 50, who)})


def test_it_is_asked_at_intervals_and_at_the_end(start: Start, tmp_path: Path, bundle: Path, plain: Plain) -> None:
    start(core_every=3, core_max_per_task=5, dtype="float32", console=plain.console)  # as loaded below
    folder = RunFolder.open(tmp_path / "run")
    assert folder.checkpoints() == [3, 4, 6, 8]  # 4 and 8 are due anyway
    records = metrics(tmp_path / "run", "core")
    assert [record["step"] for record in records] == [3, 6, 8]
    for record in records:
        assert f"step {record['step']}/8  CORE {record['metric']:.4f}" in plain.text()
        model, tokenizer = load_model(tmp_path / "run", record["step"])
        for task in read_bundle(bundle):
            expected = evaluate_task(task, ModelScorer(model, tokenizer), max_rows=5)
            found = record["tasks"][task.label]
            assert (found["rows"], found["accuracy"]) == (5, expected.accuracy)
            assert found["centred"] == centred(expected.accuracy, task.baseline)
        assert record["metric"] == sum(task["centred"] for task in record["tasks"].values()) / 2


def test_without_an_interval_or_a_bundle_it_is_not_asked(start: Start, tmp_path: Path, bundle: Path) -> None:
    start("none")
    assert not metrics(tmp_path / "none", "core")
    shutil.rmtree(bundle)
    with pytest.raises(ValueError, match="core_every=4 needs the CORE questions; download them with et data core"):
        start(core_every=4)


def test_asking_changes_nothing_else_and_a_resumed_run_asks_the_same(start: Start, tmp_path: Path) -> None:
    options = {"core_every": 3}
    start("without", checkpoint_every=3)
    start("whole", **options)
    others = [record for record in metrics(tmp_path / "whole") if record["split"] != "core"]
    assert others == metrics(tmp_path / "without")
    assert_same_checkpoint(tmp_path / "whole", tmp_path / "without")
    shutil.copytree(tmp_path / "whole", tmp_path / "halves")
    forget_after(tmp_path / "halves", 4)
    start("halves", resume=True, **options)
    assert_same_run(tmp_path / "whole", tmp_path / "halves")


def test_a_stop_in_the_middle_keeps_tasks_done(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"core_every": 4}
    start("whole", **options)
    monkeypatch.setattr("expert_threshold.evaluation.core.QUESTIONS_AT_ONCE", 2)
    asked: list[str] = []
    answer = ModelScorer.__call__

    def interrupted(self: ModelScorer, questions: Any) -> Any:
        asked.append(questions[0].kind)
        if questions[0].kind == "schema" and len(asked) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return answer(self, questions)

    monkeypatch.setattr(ModelScorer, "__call__", interrupted)
    result = start(**options)
    assert (result.step, result.finished) == (4, False)
    assert asked == ["language_modeling"] * 3 + ["schema"]
    assert not metrics(tmp_path / "run", "core")
    asked.append("")
    assert start(resume=True, **options).finished
    assert asked[5:8] == ["schema"] * 3  # of step 4, where the other task was done
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_if_core_is_interrupted_on_the_main_rank_all_ranks_stop() -> None:
    ran = mock.MagicMock(**{"_is_due.side_effect": "core".__eq__, "state.status": Status()})
    ran.parallel.ranks.from_main.return_value = False
    Evaluations.run_due(ran)
    assert ran.state.status.stop == 1


def test_too_few_questions_are_refused_before_the_first_step(start: Start, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_per_task=1: copy shows 1 solved examples"):
        start(core_every=4, core_max_per_task=1)
    assert not (tmp_path / "run" / "config.json").exists()

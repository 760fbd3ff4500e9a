"""`python -m benchmarks.gpu` without a GPU: every stage at toy sizes, and what it does when things go wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from benchmarks.gpu import ROOT, step
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.conduct import conduct, run_case
from benchmarks.gpu.record import DONE, FORMAT, NOT_RUN, Record
from benchmarks.gpu.setting import Case, NotRunError, OutOfTimeError, Setting, card, code, missing
from benchmarks.gpu.stages import STAGES, summarise

from expert_threshold.runs import RunFolder

pytestmark = pytest.mark.timeout(1500)
MINUTES = "30"  # the machine that tests may be a busy one


def start(out: Path, *options: str) -> subprocess.Popen[str]:
    """Triton is not interpreted unless the stage says so."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--minutes", MINUTES, "--out", str(out), "--dry-run", *options]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background have it ignored
    )


# What `make test` runs: what "correctness" checks has tests of its own here, and Triton's interpreter takes a minute.
QUICK = [stage for stage in STAGES if stage != "correctness"]


class Dry:
    """A dry run that was interrupted in its stage `parts`, and the one that went on. before: the files in between."""

    def __init__(self, out: Path, stages: list[str]) -> None:
        self.out, self.stages = out, stages
        process = start(out, "--stages", "ceilings,parts")
        while process.poll() is None and len(Record(out, "parts").having(*DONE)) < 2:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        self.first_output = process.communicate()[0]
        self.first_code = process.returncode
        self.before = {stage: Record(out, stage) for stage in ("ceilings", "parts")}
        process = start(out, "--stages", ",".join(stages))
        self.output = process.communicate()[0]
        self.code = process.returncode

    def cases(self, stage: str) -> dict[str, Any]:
        return Record(self.out, stage).cases


@pytest.fixture(scope="module", params=[QUICK, pytest.param([*STAGES], marks=pytest.mark.soak)], ids=["quick", "whole"])
def dry(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dry:
    return Dry(tmp_path_factory.mktemp("gpu") / "out", request.param)


def test_a_dry_run_ends_well_with_a_summary_of_one_screen(dry: Dry) -> None:
    assert dry.code == 0, dry.output
    text = (dry.out / "SUMMARY.md").read_text(encoding="utf-8")
    assert text in dry.output
    assert dry.output.splitlines()[: len(missing())] == missing()  # what is missing comes first
    assert len(text.splitlines()) < 70
    for stage in dry.stages:
        assert f"## {stage}: " in text


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_measures_without_a_failure(stage: str, dry: Dry) -> None:
    if stage not in dry.stages:
        pytest.skip("under `make soak`")
    record = Record(dry.out, stage)
    assert record.complete
    assert record.having("failed") == {}
    if not record.having("measured"):
        pytest.skip("; ".join(row["reason"] for row in record.cases.values()))
    assert {"gpu", "torch", "commit", "code", "date"} <= record.facts.keys()


def test_what_is_worth_keeping_fits_eight_flat_files(dry: Dry) -> None:
    """A machine that is lent gives back only so many, and no folders."""
    files = {path.name for path in dry.out.iterdir() if path.is_file() and not path.name.startswith(".")}
    assert files <= {"results.json", "SUMMARY.md", "compile.md", "training.tgz", "training.log"}
    with tarfile.open(dry.out / "training.tgz") as archive:
        names = archive.getnames()
    assert "training/dense/seed_0/metrics.jsonl" in names
    assert not any("checkpoints" in name for name in names)


def test_each_stage_measures_what_it_is_for(dry: Dry) -> None:
    rows = [each for row in dry.cases("layer").values() for each in row.get("contestants", [])]
    timed = {row["contestant"] for row in rows if row["status"] == "timed"}
    assert {"dense", "plain grouped_mm", "ours grouped", "ours static"} <= timed
    steps = dry.cases("step")
    assert {"tiny dense auto eager", "tiny expert_threshold static eager"} <= steps.keys()
    for row in steps.values():
        batch = step.BATCH // row["tokens"] * row["forward_backward_ms"] + row["optimizer_ms"]
        assert row["batch_ms"] == pytest.approx(batch, rel=0.01)
    (row,) = dry.cases("training").values()
    assert {run["method"] for run in row["runs"]} == {"dense", "expert_threshold"}
    for run in row["runs"]:
        assert RunFolder.open(dry.out / "training" / run["method"] / "seed_0").latest_checkpoint() == 2


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), torch.AcceleratorError("capture")])
def test_without_memory_a_step_is_tried_with_fewer_sequences_from_the_eager_ones_on(
    error: RuntimeError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture that ran out of memory counted as a failure, and tried more sequences than fit in the eager step."""
    Record(tmp_path, "step").put("d20 dense auto eager", "measured", {"sequences": 16})
    tried = []

    def measure(*arguments: Any) -> dict[str, Any]:
        tried.append(arguments[3])
        if arguments[3] > 4:
            raise error
        return {"sequences": arguments[3]}

    monkeypatch.setattr(step, "measure", measure)
    setting = setting_in(tmp_path)._replace(dry=False)
    assert step.fitted("d20", "dense", "auto", "captured", setting) == {"sequences": 4}
    assert tried == [16, 8, 4]
    monkeypatch.setattr(step, "measure", mock.Mock(side_effect=RuntimeError("something else")))
    with pytest.raises(RuntimeError, match="something else"):
        step.fitted("d20", "dense", "auto", "eager", setting)


def test_cases_of_other_code_run_again_and_with_retry_those_that_failed(tmp_path: Path) -> None:
    record = Record(tmp_path, "step")
    record.facts = {"code": "one"}
    for name, status in (("good", "measured"), ("bad", "failed"), ("late", "timed out"), ("absent", "unavailable")):
        record.put(name, status, {"reason": ""})
    assert Record(tmp_path, "step").reopen("one", retry=False) is None
    assert Record(tmp_path, "step").complete
    assert Record(tmp_path, "step").reopen("one", retry=True) == "step: 2 cases failed; they run again"
    assert Record(tmp_path, "step").having(*DONE).keys() == {"good", "absent"}
    assert not Record(tmp_path, "step").complete
    assert "step: 4 cases measured code one, and this is two" in (Record(tmp_path, "step").reopen("two", False) or "")
    assert Record(tmp_path, "step").having(*DONE) == {}
    assert code() == code()


def test_another_host_with_the_same_card_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was refused by its bytes of memory, which differ from host to host."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert card(torch.device("cuda")).keys() == {"device", "gpu", "torch", "cuda"}


def test_stages_begin_without_rustbpe() -> None:
    """A machine with torch alone may lack it, and then correctness, parts and step ended before their first case."""
    program = "import sys; sys.modules['rustbpe'] = None\nfrom benchmarks.gpu.stages import *\nfor stage in STAGES:"
    subprocess.run([sys.executable, "-c", f"{program} module_of(stage)"], cwd=ROOT, check=True)


def test_ctrl_c_loses_nothing_and_the_next_call_goes_on_at_the_case_that_is_missing(dry: Dry) -> None:
    assert dry.first_code == 130, dry.first_output
    assert "to go on where it stopped" in dry.first_output
    assert dry.before["ceilings"].complete
    assert not dry.before["parts"].complete
    assert "ceilings: complete" in dry.output
    for name in ("ceilings", "parts"):
        done = dry.before[name].having(*DONE)
        assert done
        assert {case: dry.cases(name)[case] for case in done} == done  # seconds and all: none was run again


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stages", "layr"], "--stages: layr is unknown; use ceilings"),
        (["--minutes", "0"], "--minutes 0.0: give a number above 0"),
        (["--minutes", "soon"], "invalid float value: 'soon'"),
        (["--data", "nowhere"], "--data nowhere: does not exist"),
        (["--out", __file__], "is a file; name a folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--dry-run", "--out", str(tmp_path / "out"), *options])
    with pytest.raises(SystemExit, match="2"):
        main()
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_results_of_another_machine_or_of_something_else_are_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--dry-run", "--stages", "ceilings", "--out", str(tmp_path)])
    other = {"format": FORMAT, "stages": {"step": {"facts": {"gpu": "NVIDIA H100"}, "cases": {}}}}
    for text, message in (
        (json.dumps(other), "was started with device None, gpu NVIDIA H100"),
        ("{", "is damaged or was not written by this benchmark"),
    ):
        (tmp_path / "results.json").write_text(text)
        with pytest.raises(SystemExit, match="2"):
            main()
        assert message in capsys.readouterr().err


def setting_in(folder: Path) -> Setting:
    return Setting(folder, dry=True, cuda=False, data="embedded")


def test_a_failing_case_is_recorded_and_one_out_of_time_is_left_to_the_next_call(tmp_path: Path) -> None:
    def raising(error: Exception) -> Callable[[], dict[str, Any]]:
        def run() -> dict[str, Any]:
            raise error

        return run

    record = Record(tmp_path, "step")
    for name, error in {
        "bad": RuntimeError("first line\nsecond"),
        "absent": NotRunError("needs a card"),
        "late": OutOfTimeError("saved at step 3"),
    }.items():
        run_case(record, Case(name, raising(error)), setting_in(tmp_path))
    assert {name: row["status"] for name, row in record.cases.items()} == {
        "bad": "failed", "absent": "unavailable", "late": "not run",
    }  # fmt: skip
    assert record.cases["bad"]["reason"] == "RuntimeError: first line second"
    assert not record.complete
    record.facts = FACTS
    record.write()
    assert "FAILED bad: RuntimeError: first line second" in summarise(tmp_path)


FACTS = {"gpu": "a card", "commit": "0" * 40, "date": "today", "code": ""}


class _Process:
    """Plays a stage: the first process dies in its second case, the next one does what is left."""

    begun = 0

    def __init__(self, target: object, args: tuple[str, Setting]) -> None:
        self.stage, self.setting = args
        self.exitcode: int | None = None

    def start(self) -> None:
        _Process.begun += 1
        record = Record(self.setting.out, self.stage)
        record.cases = dict.fromkeys(("one", "two", "three"), NOT_RUN) | record.having(*DONE)
        for case in [name for name in record.cases if name not in record.having(*DONE)]:
            record.put(case, "running", {})
            if case == "two":
                self.exitcode = -11
                return
            record.put(case, "measured", {})
        self.exitcode = 0

    def join(self, timeout: float) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def is_alive(self) -> bool:
        return False


def conducted(folder: Path, process: type[_Process]) -> Record:
    context: Any = SimpleNamespace(Process=process)
    conduct(["step"], setting_in(folder), time.monotonic() + 60, context)
    return Record(folder, "step")


def test_a_case_that_kills_its_process_is_recorded_and_the_others_run(tmp_path: Path) -> None:
    record = conducted(tmp_path, _Process)
    assert {name: row["status"] for name, row in record.cases.items()} == {
        "one": "measured", "two": "failed", "three": "measured",
    }  # fmt: skip
    assert record.cases["two"]["reason"] == "the process ended with exit code -11"
    assert record.complete
    assert _Process.begun == 2


def test_a_case_that_outlasts_its_stage_is_recorded_as_timed_out(tmp_path: Path) -> None:
    class Hanging(_Process):
        ended = False

        def terminate(self) -> None:
            self.ended = True

        def is_alive(self) -> bool:
            return not self.ended

    record = conducted(tmp_path, Hanging)
    assert record.cases["two"] == {"status": "timed out", "reason": "the stage's time was up"}
    del record.cases["one"]  # an empty row, of which there is nothing to say
    record.facts = FACTS
    record.write()
    assert "TIMED OUT two: the stage's time was up" in summarise(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_card_one_line_says_what_works(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path), "--stages", "ceilings"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("--dry-run runs every stage at toy sizes, --stages compile needs none\n")
    assert len(done.stderr.splitlines()) == 1

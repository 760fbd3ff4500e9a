"""`python -m benchmarks.gpu` without a GPU: every stage at toy sizes, and what it does when things go wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import ROOT
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.about import missing
from benchmarks.gpu.compiler import resident_blocks
from benchmarks.gpu.conduct import conduct
from benchmarks.gpu.layer import TIMED
from benchmarks.gpu.record import Record
from benchmarks.gpu.setting import Case, NotRunError, OutOfTimeError, Setting
from benchmarks.gpu.stages import STAGES, module_of
from benchmarks.gpu.summary import summarise
from benchmarks.gpu.worker import run_case

from cases import no_waiting

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


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


# What `make test` runs: what "correctness" checks has tests of its own here, and Triton's interpreter takes a minute.
QUICK = [stage for stage in STAGES if stage != "correctness"]


class Dry:
    """A dry run that was interrupted in its stage `parts`, and the one that went on. before: the files in between."""

    def __init__(self, out: Path, stages: list[str]) -> None:
        self.out, self.stages = out, stages
        process = start(out, "--stages", "ceilings,parts")
        while process.poll() is None and len(self.cases("parts")) < 2:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        self.first_output = process.communicate()[0]
        self.first_code = process.returncode
        self.before = {path.name: read(path) for path in out.glob("*.json")}
        process = start(out, "--stages", ",".join(stages))
        self.output = process.communicate()[0]
        self.code = process.returncode

    def cases(self, stage: str) -> dict[str, Any]:
        path = self.out / f"{stage}.json"
        cases: dict[str, Any] = read(path)["cases"] if path.exists() else {}
        return cases


@pytest.fixture(scope="module", params=[QUICK, pytest.param([*STAGES], marks=pytest.mark.soak)], ids=["quick", "whole"])
def dry(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dry:
    return Dry(tmp_path_factory.mktemp("gpu") / "out", request.param)


def test_a_dry_run_ends_well_with_a_summary_of_one_screen(dry: Dry) -> None:
    assert dry.code == 0, dry.output
    text = (dry.out / "SUMMARY.md").read_text(encoding="utf-8")
    assert text in dry.output
    assert len(text.splitlines()) < 70
    for stage in dry.stages:
        assert f"## {stage}: " in text


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_the_fields_it_promises_and_no_failure(stage: str, dry: Dry) -> None:
    if stage not in dry.stages:
        pytest.skip("under `make soak`")
    record = read(dry.out / f"{stage}.json")
    assert record["complete"]
    assert record["running"] is None
    failed = {name: row["reason"] for name, row in record["cases"].items() if row["status"] == "failed"}
    assert failed == {}
    measured = [row for row in record["cases"].values() if row["status"] == "measured"]
    if not measured:
        pytest.skip("; ".join(row["reason"] for row in record["cases"].values()))
    for row in measured:
        assert set(module_of(stage).FIELDS) <= row.keys()
    assert {"gpu", "torch", "commit", "date"} <= record["facts"].keys()


def test_stages_begin_without_rustbpe() -> None:
    """A machine with torch alone may lack it, and then correctness, parts and step ended before their first case."""
    program = "import sys; sys.modules['rustbpe'] = None\nfrom benchmarks.gpu.stages import *\nfor stage in STAGES:"
    subprocess.run([sys.executable, "-c", f"{program} module_of(stage)"], cwd=ROOT, check=True)


def test_the_mode_in_which_waiting_is_an_error_ends_with_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch warns once that it is a prototype; as an error, that left the mode on for the rest of the process."""
    modes = []

    def set_mode(mode: str) -> None:
        modes.append(mode)
        if len(modes) == 1:
            warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect", stacklevel=2)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with no_waiting():
        assert modes == ["error"]
    with pytest.raises(RuntimeError, match="waited"), no_waiting():
        raise RuntimeError("waited")
    assert modes == ["error", "default"] * 2


def test_tests_run_without_pytest_timeout() -> None:
    """The limit that pyproject.toml sets was then unknown, an error in the setup of every test."""
    options = ["-q", "-p", "no:timeout", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestConfigWarning"]
    options += ["-o", "addopts=--import-mode=importlib"]
    subprocess.run([sys.executable, "-m", "pytest", *options, "tests/test_install.py"], cwd=ROOT, check=True)


def test_contestants_of_the_layer_are_timed(dry: Dry) -> None:
    rows = [each for row in dry.cases("layer").values() for each in row.get("contestants", [])]
    timed = [row for row in rows if row["status"] == "timed"]
    assert {"dense", "plain grouped_mm", "ours grouped", "ours static"} <= {row["contestant"] for row in timed}
    for row in timed:
        assert set(TIMED) <= row.keys()


def test_ctrl_c_loses_nothing_and_the_next_call_goes_on_at_the_case_that_is_missing(dry: Dry) -> None:
    assert dry.first_code == 130, dry.first_output
    assert "to go on where it stopped" in dry.first_output
    assert dry.before["ceilings.json"]["complete"]
    assert not dry.before["parts.json"]["complete"]
    assert "ceilings: complete" in dry.output
    for name in ("ceilings", "parts"):
        done = dry.before[f"{name}.json"]["cases"]
        assert done
        assert {case: dry.cases(name)[case] for case in done} == done  # seconds and all: none was run again
    assert len(dry.cases("parts")) > len(dry.before["parts.json"]["cases"])


def test_runs_are_folders_that_the_package_reads(dry: Dry) -> None:
    from expert_threshold.runs import RunFolder

    rows = [row for row in dry.cases("training").values() if row.get("loss") is not None]
    assert {row["method"] for row in rows} == {"dense", "expert_threshold"}
    for row in rows:
        run = RunFolder.open(dry.out / row["folder"])
        assert run.latest_checkpoint() == row["steps"]


def test_what_is_missing_is_told_first(dry: Dry) -> None:
    told = dry.output.splitlines()[: len(missing())]
    assert told == missing()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stages", "layr"], "--stages layr: unknown; use ceilings"),
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
    try:
        code = main()
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
    said = capsys.readouterr()
    assert code == 2
    assert message in said.err
    assert len(said.err.splitlines()) == 1


def test_results_of_another_machine_or_of_something_else_are_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--dry-run", "--stages", "ceilings", "--out", str(tmp_path)])
    for text, message in (
        ('{"format": "expert-threshold gpu benchmark 1", "gpu": "NVIDIA H100"}', "was begun with device None"),
        ("{", "not written by this benchmark, or damaged"),
    ):
        (tmp_path / "machine.json").write_text(text)
        assert main() == 2
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
    record.end()
    found = read(tmp_path / "step.json")
    assert {name: row["status"] for name, row in found["cases"].items()} == {
        "bad": "failed", "absent": "unavailable", "late": "not run",
    }  # fmt: skip
    assert found["cases"]["bad"]["reason"] == "RuntimeError: first line second"
    assert not found["complete"]
    assert [name for name in found["cases"] if not record.is_done(name)] == ["late"]
    found["facts"] = {"gpu": "a card", "commit": "0" * 40, "date": "today"}
    (tmp_path / "step.json").write_text(json.dumps(found))
    assert "FAILED bad: RuntimeError: first line second" in summarise(tmp_path)


class _Process:
    """Plays a stage: the first process dies in its second case, the next one does what is left."""

    begun = 0

    def __init__(self, target: object, args: tuple[str, Setting]) -> None:
        self.stage, self.setting = args
        self.exitcode: int | None = None

    def start(self) -> None:
        record = Record(self.setting.out, self.stage)
        for case in ("one", "two", "three"):
            if record.is_done(case):
                continue
            record.begin(case)
            if case == "two":
                self.exitcode = -11
                _Process.begun += 1
                return
            record.put(case, "measured", {})
        record.end()
        self.exitcode = 0
        _Process.begun += 1

    def join(self, timeout: float) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def is_alive(self) -> bool:
        return False


def test_a_case_that_kills_its_process_is_recorded_and_the_others_run(tmp_path: Path) -> None:
    class Context:
        Process = _Process

    conduct(["step"], setting_in(tmp_path), time.monotonic() + 60, Context())  # type: ignore[arg-type]
    record = Record(tmp_path, "step")
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

    class Context:
        Process = Hanging

    conduct(["step"], setting_in(tmp_path), time.monotonic() + 60, Context())  # type: ignore[arg-type]
    record = Record(tmp_path, "step")
    assert record.cases["two"] == {"status": "timed out", "reason": "the stage's time was up"}
    assert record.is_done("two")
    del record.cases["one"]  # an empty row, of which there is nothing to say
    record.facts = {"gpu": "a card", "commit": "0" * 40, "date": "today"}
    record.write()
    assert "TIMED OUT two: the stage's time was up" in summarise(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_card_one_line_says_what_works(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path), "--stages", "ceilings"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("--dry-run runs every stage at toy sizes, --stages compile needs none\n")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "capability", "blocks"),
    [
        (32, 0, 4, 90, 16),  # by warps: 64 / 4
        (32, 0, 1, 90, 32),  # by blocks
        (128, 0, 8, 90, 2),  # by registers: 65,536 / (128 · 32 · 8)
        (129, 0, 8, 90, 1),  # registers are given out in eights: 136 · 32 · 8 leave room for one
        (255, 0, 16, 90, 0),  # more registers than there are
        (32, 100 << 10, 4, 90, 2),  # by shared memory, with the system's KiB: 228 / 101
        (32, 100 << 10, 4, 80, 1),  # 164 / 101
        (32, 164 << 10, 4, 80, 0),  # beyond what one block gets
    ],
)
def test_occupancy_is_that_of_the_programming_guide(
    registers: int, shared: int, warps: int, capability: int, blocks: int
) -> None:
    assert resident_blocks(registers, shared, warps, capability) == blocks

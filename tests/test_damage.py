"""Files of a run that were cut, replaced or lost: every command that reads them back says so in one line and harms
nothing else."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cases import et, write_text
from expert_threshold import full_run
from expert_threshold.analysis.methods import read_subjects
from expert_threshold.analysis.run import read_run
from expert_threshold.runs import RunFolder

FILES = (
    "config.json",
    "tokenizer.json",
    "metrics.jsonl",
    "evaluation.json",
    "samples/step_000003.txt",
    "checkpoints/step_000003/manifest.json",
    "checkpoints/step_000003/state.json",
    "checkpoints/step_000003/model.safetensors",
    "checkpoints/step_000003/optimizer.safetensors",
)
COMMANDS = {
    "resume": ("train", "--resume", "RUN"),
    "evaluate": ("evaluate", "RUN"),
    "generate": ("generate", "RUN", "--max-tokens", "2"),
    "export": ("export", "RUN", "--to", "NEW"),
    "upcycle": ("upcycle", "RUN", "--to", "NEW"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run that was evaluated, and has one step to go and an event. No test may change it."""
    folder = tmp_path_factory.mktemp("run")
    corpus = write_text(folder / "corpus.jsonl", "a b c d e f g h i j k l m the cat and mat")
    sizes = ["--vocab-size", 270, "--batch-size", 2, "--context", 32, "--d-model", 32, "--heads", 2]
    intervals = ["--steps", 4, "--eval-every", 3, "--sample-every", 3, "--checkpoint-every", 3, "--log-every", 1]
    intervals += ["--eval-tokens", 128]
    threads = torch.get_num_threads()
    with contextlib.redirect_stdout(io.StringIO()):
        options = ["tiny", "--data", corpus, *sizes, *intervals, "--threads", 1]
        assert et("train", *options, "--out", folder / "run") == 0
    run = RunFolder.open(folder / "run")
    shutil.rmtree(run.path / "checkpoints" / "step_000004")
    run.metrics.truncate_after(3)
    run.metrics.append({"step": 3, "split": "event", "event": "dead_expert", "layer": 1, "expert": 0})
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert et("evaluate", run.path) == 0
    yield run.path
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read what a report reads, but draw nothing, which would take most of the time."""
    monkeypatch.setattr(full_run, "write_report", read_run)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_told(run: Path, copy: Path, name: str, data: bytes | None, command: str) -> None:
    """Assert that with `data` as that file the command works, or fails with one line and changes nothing."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy)
    (copy / name).unlink()
    if data is not None:
        (copy / name).write_bytes(data)
    before, err = content(copy), io.StringIO()
    given = {"RUN": copy, "NEW": copy.with_name("new")}
    shutil.rmtree(given["NEW"], ignore_errors=True)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        code = et(*(given.get(argument, argument) for argument in COMMANDS[command]))
    assert code in (0, 2)
    if code == 2:
        assert err.getvalue().startswith(f"et {COMMANDS[command][0]}: ")
        assert err.getvalue().count("\n") == 1
        assert content(copy) == before
        assert not given["NEW"].exists()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_replaced_or_lost(name: str, command: str, run: Path, tmp_path: Path) -> None:
    whole = (run / name).read_bytes()
    for data in (None, b"", whole[: len(whole) // 2], b"{}\n{}\n", b"\xff\n", b"[" * 100_000 + b"\n"):
        assert_told(run, tmp_path / "run", name, data, command)


def places(value: Any) -> Iterator[tuple[str | int, ...]]:
    """The path of everything in a JSON value; of a list the first."""
    inner = value.items() if isinstance(value, dict) else list(enumerate(value))[:1] if isinstance(value, list) else []
    for key, item in inner:
        yield (key,)
        yield from ((key, *path) for path in places(item))


def changed(value: Any, path: tuple[str | int, ...], new: Any) -> Any:
    """Return the record with another value at that path, or without it if `new` is `...`."""
    place = value
    for key in path[:-1]:
        place = place[key]
    if new is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = new
    return value


@settings(
    max_examples=settings.default.max_examples // 2,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_a_record_with_something_missing_or_else_in_it(data: st.DataObject, run: Path, tmp_path: Path) -> None:
    name = data.draw(st.sampled_from([name for name in FILES if name.endswith((".json", ".jsonl"))]))
    lines = (run / name).read_text().splitlines() if name.endswith(".jsonl") else [(run / name).read_text()]
    number = data.draw(st.integers(0, len(lines) - 1))
    record = json.loads(lines[number])
    place = data.draw(st.sampled_from(list(places(record))))
    new = data.draw(st.sampled_from([..., None, "x", -1, 0, 1e300, [], {}, True]))
    lines[number] = json.dumps(changed(record, place, new))
    command = data.draw(st.sampled_from(list(COMMANDS)))
    assert_told(run, tmp_path / "run", name, ("\n".join(lines) + "\n").encode(), command)


@pytest.mark.parametrize(("place", "value"), [("layer", []), ("expert", {}), ("expert", None)])
def test_a_dead_expert_without_a_number_is_told(place: str, value: Any, run: Path, tmp_path: Path) -> None:
    """A list for the layer ended `et train --resume` in a TypeError."""
    event = {"step": 1, "split": "event", "event": "dead_expert", "layer": 1, "expert": 2, place: value}
    metrics = (run / "metrics.jsonl").read_bytes() + json.dumps(event).encode() + b"\n"
    assert_told(run, tmp_path / "run", "metrics.jsonl", metrics, "resume")


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("config.json", ("train",), []),
        ("config.json", ("train", "batch_size"), "x"),
        ("config.json", ("data",), []),
        ("config.json", ("data", "source"), 5),
        ("evaluation.json", ("core",), []),
        ("evaluation.json", ("core",), {"tasks": {"t": 5}}),
        ("evaluation.json", ("validation",), 5),
        ("evaluation.json", ("validation", "loss"), "x"),
    ],
)
def test_a_damaged_file_is_named_by_export(
    name: str, path: tuple[str, ...], value: Any, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / name).write_text(json.dumps(changed(json.loads((copy / name).read_text()), path, value)))
    assert et("export", copy, "--to", tmp_path / "new") == 2
    assert str(copy / name) in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_damaged_loss_of_training_is_named_by_export(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "evaluation.json").unlink()
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    lines = [line | ({"loss": "x"} if line["split"] == "validation" else {}) for line in lines]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert et("export", copy, "--to", tmp_path / "new") == 2
    assert f"{copy / 'metrics.jsonl'}: damaged" in capsys.readouterr().err


def test_a_damaged_loss_is_named_before_anything_is_drawn(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    train = next(line for line in lines if line["split"] == "train")
    layer = next(iter(train["layers"]))
    config = (copy / "config.json").read_text()
    for path, value in ((("loss",), "x"), (("layers", layer, "usage"), "x"), (("layers",), {"x": {}})):
        (copy / "metrics.jsonl").write_text(json.dumps(changed(json.loads(json.dumps(train)), path, value)) + "\n")
        with pytest.raises(ValueError, match=f"{re.escape(str(copy))}: damaged"):
            read_subjects([RunFolder.open(copy)])
    (copy / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes())
    (copy / "config.json").write_text(json.dumps(changed(json.loads(config), ("train", "steps"), ...)))
    with pytest.raises(ValueError, match=f"{re.escape(str(copy))}: damaged"):
        read_subjects([RunFolder.open(copy)])

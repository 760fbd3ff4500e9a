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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cases import et
from commands import Refused, content, edit, lines, put, read, write_lines
from expert_threshold import full_run
from expert_threshold.analysis.methods import read_methods
from expert_threshold.analysis.records import read_run
from expert_threshold.runs import RunFolder

PARTS = ("manifest.json", "state.json", "model.safetensors", "optimizer.safetensors")
FILES = ("config.json", "tokenizer.json", "metrics.jsonl", "evaluation.json", "samples/step_000002.txt")
FILES += tuple(f"checkpoints/step_000002/{part}" for part in PARTS)
COMMANDS = {
    "resume": ("train", "--resume", "RUN"),
    "evaluate": ("evaluate", "RUN"),
    "generate": ("generate", "RUN", "--max-tokens", "2"),
    "export": ("export", "RUN", "--to", "NEW"),
    "upcycle": ("upcycle", "RUN", "--to", "NEW"),
}
READERS = COMMANDS | {
    "init": ("train", "tiny", "--init-from", "RUN", "--out", "NEW"),
    "calibrate": ("calibrate", "RUN", "--to", "NEW"),
}


@pytest.fixture(scope="module")
def evaluated(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluated run with an event and two steps left to train. No test may change it."""
    folder = RunFolder.open(shutil.copytree(run, tmp_path_factory.mktemp("run") / "run"))
    shutil.rmtree(folder.path / "checkpoints" / "step_000004")
    folder.metrics.truncate_after(2)
    folder.metrics.append({"step": 2, "split": "event", "event": "dead_expert", "layer": 1, "expert": 0})
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert et("evaluate", folder.path) == 0
    return folder.path


@pytest.fixture
def copy(evaluated: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(evaluated, tmp_path / "run"))


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read what a report reads, but draw nothing, which would take most of the time."""
    monkeypatch.setattr(full_run, "write_report", read_run)


def assert_reported(run: Path, copy: Path, name: str, data: bytes | None, command: str) -> None:
    """Assert that, with `data` in the file, the command works, or fails with one line and changes nothing."""
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
def test_a_file_that_is_cut_replaced_or_lost(name: str, command: str, evaluated: Path, tmp_path: Path) -> None:
    whole = (evaluated / name).read_bytes()
    for data in (None, b"", whole[: len(whole) // 2], b"{}\n{}\n", b"\xff\n", b"[" * 100_000 + b"\n"):
        assert_reported(evaluated, tmp_path / "run", name, data, command)


def places(value: Any) -> Iterator[tuple[str | int, ...]]:
    """The path of every element of a JSON value; only the first element of each list."""
    inner = value.items() if isinstance(value, dict) else list(enumerate(value))[:1] if isinstance(value, list) else []
    for key, item in inner:
        yield (key,)
        yield from ((key, *path) for path in places(item))


@settings(
    max_examples=settings.default.max_examples // 2,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_a_record_with_something_missing_or_else_in_it(data: st.DataObject, evaluated: Path, tmp_path: Path) -> None:
    name = data.draw(st.sampled_from([name for name in FILES if name.endswith((".json", ".jsonl"))]))
    text = (evaluated / name).read_text()
    records = [json.loads(record) for record in (text.splitlines() if name.endswith(".jsonl") else [text])]
    record = records[data.draw(st.integers(0, len(records) - 1))]
    path = data.draw(st.sampled_from(list(places(record))))
    put(record, path, data.draw(st.sampled_from([..., None, "x", -1, 0, 1e300, [], {}, True])))
    command = data.draw(st.sampled_from(list(COMMANDS)))
    written = "".join(json.dumps(record) + "\n" for record in records).encode()
    assert_reported(evaluated, tmp_path / "run", name, written, command)


@pytest.mark.parametrize(
    ("command", "name", "path", "value"),
    [
        *((command, "config.json", "model.d_model", "x") for command in READERS),
        ("generate", "config.json", "model", 5),
        ("resume", "config.json", "rule", None),
        ("export", "config.json", "train", []),
        ("export", "config.json", "train.batch_size", "x"),
        ("export", "config.json", "data", []),
        ("export", "config.json", "data.source", 5),
        ("export", "evaluation.json", "core", []),
        ("export", "evaluation.json", "core", {"tasks": {"t": 5}}),
        ("export", "evaluation.json", "validation", 5),
        ("export", "evaluation.json", "validation.loss", "x"),
        ("export", "metrics.jsonl", "loss", "x"),
        ("resume", "metrics.jsonl", "layer", []),  # of a dead expert: once ended with a TypeError
        ("resume", "metrics.jsonl", "expert", None),
    ],
)
def test_a_value_of_another_kind_is_refused_by_the_name_of_its_file(
    command: str, name: str, path: str, value: Any, copy: Path, refused: Refused, tmp_path: Path
) -> None:
    if name == "metrics.jsonl":
        (copy / "evaluation.json").unlink()  # which export prefers
    records = [read(copy / name)] if name.endswith(".json") else lines(copy / name)
    for record in records:
        if name.endswith(".json") or path in record:
            put(record, path, value)
    write_lines(copy / name, records)
    given = {"RUN": copy, "NEW": tmp_path / "new"}
    line = refused([given.get(word, word) for word in READERS[command]], str(copy / name))
    assert path.partition(".")[2] in line or command == "export"


def test_a_damaged_loss_is_named_before_anything_is_drawn(copy: Path) -> None:
    whole = (copy / "metrics.jsonl").read_bytes()
    for path, value in (("loss", "x"), ("layers.1.usage", "x"), ("layers", {"x": {}})):
        record = next(record for record in map(json.loads, whole.splitlines()) if record["split"] == "train")
        put(record, path, value)
        write_lines(copy / "metrics.jsonl", [record])
        with pytest.raises(ValueError, match=f"{re.escape(str(copy))} is damaged"):
            read_methods([RunFolder.open(copy)])
    (copy / "metrics.jsonl").write_bytes(whole)
    with edit(copy / "config.json") as config:
        del config["train"]["steps"]
    with pytest.raises(ValueError, match=f"{re.escape(str(copy))} is damaged"):
        read_methods([RunFolder.open(copy)])

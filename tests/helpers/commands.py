"""Helpers for tests of commands: files as they were, records changed in place, and Ctrl-C at a chosen step."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

Options = list[object]
Refused = Callable[..., str]
"""The fixture `refused(arguments, *words)` of tests/conftest.py."""


def content(folder: Path) -> dict[str, str]:
    """The hash of every file and the name of every folder below `folder`."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


def read(path: Path) -> Any:
    return json.loads(path.read_bytes())


def lines(path: Path) -> list[Any]:
    """The records of a .jsonl file."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def write_lines(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run_python(*arguments: str | Path, path: Sequence[Path] = (), cwd: Path | None = None, **environment: str) -> str:
    """Run Python to its end with exit code 0, and return its stdout. path: folders to import from before all others."""
    folders = os.pathsep.join([*map(str, path), *sys.path])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": folders} | environment
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextlib.contextmanager
def edit(path: Path) -> Iterator[Any]:
    """Yield the JSON of a file, and write it back as it is after the block."""
    value = read(path)
    yield value
    path.write_text(json.dumps(value))


def put(record: Any, path: str | Sequence[str | int], value: Any) -> None:
    """Set the value at a path such as `layers.1.usage`, or remove it where the value is `...`."""
    *parents, last = path.split(".") if isinstance(path, str) else path
    for part in parents:
        record = record[part]
    if value is ...:
        del record[last]
    else:
        record[last] = value


def without(value: Any, names: Collection[str]) -> Any:
    """The same record, at any depth without the keys of these names."""
    if isinstance(value, dict):
        return {key: without(item, names) for key, item in value.items() if key not in names}
    return [without(item, names) for item in value] if isinstance(value, list) else value


CLOCKS = {"tokens_per_second", "seconds", "interval_seconds", "elapsed", "clock", "seconds_to_loss", "at_seconds"}
"""The keys of records that differ between equal runs."""


class Experiment(NamedTuple):
    """The command that fills the folder `out` with runs, and what it writes there, without `CLOCKS`."""

    name: str
    options: Options
    out: Path

    @property
    def command(self) -> Options:
        return [self.name, *self.options, "--out", self.out]

    @property
    def record(self) -> Any:
        return without(read(self.out / f"{self.name}.json"), CLOCKS)

    @property
    def metrics(self) -> dict[Path, Any]:
        """The metrics of each run, keyed by its path below `out`."""
        paths = sorted(self.out.rglob("metrics.jsonl"))
        return {path.parent.relative_to(self.out): without(lines(path), CLOCKS) for path in paths}

    @property
    def configs(self) -> list[Any]:
        return [read(path) for path in sorted(self.out.rglob("config.json"))]

    def copy(self, to: Path) -> Experiment:
        return self._replace(out=Path(shutil.copytree(self.out, to)))


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in that step, counted over all runs."""
    from expert_threshold.train import loop

    train_step, made = loop.train_step, 0

    def interrupted(*arguments: Any) -> bool:
        nonlocal made
        made += 1
        if made == step:
            signal.raise_signal(signal.SIGINT)
        return train_step(*arguments)

    monkeypatch.setattr(loop, "train_step", interrupted)

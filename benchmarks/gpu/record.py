"""A stage's JSON: one entry for each case, written whole and atomically as each case ends."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .setting import Row

FORMAT = "expert-threshold gpu benchmark 1"
FAILURES = ("failed", "timed out")
DONE = ("measured", *FAILURES, "unavailable")
"""The statuses of cases that a resumed run leaves alone; one more, "not run", is for lack of time."""


def write_json(path: Path, value: Any) -> None:
    """Replace a file by `value`; readers see the old or the new one, whole."""
    temporary = path.with_name(f".tmp-{path.name}")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_json(path: Path) -> Row:
    """Return the object in a file; an empty one if it is absent. Raises ValueError, with the remedy, for any other."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        value = None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ValueError(f"{path}: not written by this benchmark, or damaged; remove it, or name another --out")
    return value


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold the folder for this process. Raises ValueError if another one writes there."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"--out {folder}: another run is writing there; wait for it, or name another") from None
        yield


class Record:
    """The results of one stage in FOLDER/STAGE.json.

    `cases` maps names to rows, each with a `status`: "measured"; "failed", "timed out" (stopped after its stage's time)
    or "unavailable", with a `reason`; "not run" for lack of time. `running` names the case that was begun and has not
    ended. `complete` says that nothing is left.
    """

    def __init__(self, folder: Path, stage: str) -> None:
        self.path = folder / f"{stage}.json"
        before = read_json(self.path)
        self.stage = stage
        self.facts: Row = before.get("facts", {})
        self.cases: dict[str, Row] = before.get("cases", {})
        self.running: str | None = before.get("running")
        self.complete: bool = before.get("complete", False)

    def is_done(self, case: str) -> bool:
        return self.cases.get(case, {}).get("status") in DONE

    def begin(self, case: str) -> None:
        self.running = case
        self.write()

    def put(self, case: str, status: str, row: Row) -> None:
        """Enter a case's row."""
        self.running = None
        self.cases[case] = {"status": status, **row}
        self.write()

    def end(self) -> None:
        """Say that every case was reached, which is all of the work unless the time ran out before some."""
        self.running = None
        self.complete = all(row["status"] in DONE for row in self.cases.values())
        self.write()

    def count(self, status: str) -> int:
        return sum(row["status"] == status for row in self.cases.values())

    def measured(self) -> dict[str, Row]:
        return {name: row for name, row in self.cases.items() if row["status"] == "measured"}

    def write(self) -> None:
        names = ("stage", "complete", "running", "facts", "cases")
        write_json(self.path, {"format": FORMAT} | {name: getattr(self, name) for name in names})

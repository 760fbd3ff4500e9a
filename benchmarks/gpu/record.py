"""FOLDER/results.json: the machine, and one entry for each case of each stage, written whole as each case ends."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from expert_threshold.files import read_json, replace_file

from .setting import Row

FILE = "results.json"
FORMAT = "expert-threshold gpu benchmark 2"
FAILURES = ("failed", "timed out")
DONE = ("measured", *FAILURES, "unavailable")
"""The statuses of cases that a later run leaves alone; one more, "not run", is for lack of time."""


def read(folder: Path) -> Row:
    """Return the content of the file; nothing if it is absent. Raises ValueError, with the remedy, for any other."""
    path = folder / FILE
    if not path.exists():
        return {"format": FORMAT, "machine": None, "stages": {}}
    value = read_json(path)
    if value.get("format") != FORMAT:
        raise ValueError(f"{path} is damaged or was not written by this benchmark; remove it, or use another --out")
    return value


def write(folder: Path, value: Row) -> None:
    replace_file(folder / FILE, json.dumps(value, indent=1).encode())


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
    """The results of one stage.

    `cases` maps names to rows, each with a `status`: "measured"; "failed", "timed out" (stopped after its stage's time)
    or "unavailable", with a `reason`; "not run" for lack of time. `running` names the case that was started and has not
    ended. `complete` says that nothing is left.
    """

    def __init__(self, folder: Path, stage: str) -> None:
        self.folder, self.stage = folder, stage
        before = read(folder)["stages"].get(stage, {})
        self.exists = bool(before)
        self.facts: Row = before.get("facts", {})
        self.cases: dict[str, Row] = before.get("cases", {})
        self.running: str | None = before.get("running")
        self.complete: bool = before.get("complete", False)

    def reopen(self, code: str, retry: bool) -> str | None:
        """Forget what other code measured, and with `retry` what failed; return a line about it, None if nothing."""
        old = self.facts.get("code")
        again = [n for n, row in self.cases.items() if old != code or (retry and row["status"] in FAILURES)]
        if not again:
            return None
        for name in again:
            del self.cases[name]
        self.complete = False
        self.write()
        why = f"measured code {old}, and this is {code}" if old != code else "failed"
        return f"{self.stage}: {len(again)} cases {why}; they run again"

    def is_done(self, case: str) -> bool:
        return self.cases.get(case, {}).get("status") in DONE

    def start(self, case: str) -> None:
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
        value = read(self.folder)
        value["stages"][self.stage] = {name: getattr(self, name) for name in ("complete", "running", "facts", "cases")}
        write(self.folder, value)

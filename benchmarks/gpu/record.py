"""FOLDER/results.json: what measured each stage, and a row for each of its cases, written whole as each case ends."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from expert_threshold.files import read_json, replace_file

from .setting import Row

FILE = "results.json"
FORMAT = "expert-threshold gpu benchmark 3"
FAILURES = ("failed", "timed out")
DONE = ("measured", *FAILURES, "unavailable")
"""The statuses of cases that a later run leaves alone."""
NOT_RUN = {"status": "not run", "reason": "its time was up"}


def read(folder: Path) -> Row:
    """Return the content of the file; nothing if it is absent. Raises ValueError, with the remedy, for any other."""
    path = folder / FILE
    value = read_json(path) if path.exists() else {"format": FORMAT, "stages": {}}
    if value.get("format") != FORMAT:
        raise ValueError(f"{path} is damaged or was not written by this benchmark; remove it, or use another --out")
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
    """The results of one stage: `facts` about what measures it, and a row for each of its cases by name.

    A row's status is "not run", "running", "measured", "failed", "timed out" (stopped after its stage's time) or
    "unavailable"; all but "running" and "measured" come with a `reason`.
    """

    def __init__(self, folder: Path, stage: str) -> None:
        self.folder, self.stage = folder, stage
        before = read(folder)["stages"].get(stage, {"facts": {}, "cases": {}})
        self.facts: Row = before["facts"]
        self.cases: dict[str, Row] = before["cases"]

    def having(self, *statuses: str) -> dict[str, Row]:
        return {name: row for name, row in self.cases.items() if row["status"] in statuses}

    @property
    def complete(self) -> bool:
        return 0 < len(self.cases) == len(self.having(*DONE))

    def reopen(self, code: str, retry: bool) -> str | None:
        """Forget what other code measured, and with `retry` what failed; return a line about it, None if nothing."""
        old = self.facts.get("code")
        again = self.cases if old != code else self.having(*FAILURES) if retry else {}
        if not again:
            return None
        self.cases |= dict.fromkeys(again, NOT_RUN)
        self.write()
        why = f"measured code {old}, and this is {code}" if old != code else "failed"
        return f"{self.stage}: {len(again)} cases {why}; they run again"

    def put(self, case: str, status: str, row: Row) -> None:
        self.cases[case] = {"status": status, **row}
        self.write()

    def write(self) -> None:
        value = read(self.folder)
        value["stages"][self.stage] = {"facts": self.facts, "cases": self.cases}
        replace_file(self.folder / FILE, json.dumps(value, indent=1).encode())

"""Reads and writes `metrics.jsonl`, which contains one JSON object per line, each with a `step` and a `split`."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files import named, replace_file, to_json

log = logging.getLogger(__name__)


class Metrics:
    """A run's measurements in chronological order. Other processes may read the file while training appends to it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record as one line, with null for NaN and infinity. If this raises OSError, nothing is added."""
        assert isinstance(record["step"], int), record["step"]
        assert isinstance(record["split"], str), record["split"]
        line = (to_json(_finite(record)) + "\n").encode()
        with named(self.path), self.path.open("ab", buffering=0) as file:
            end = file.tell()
            if file.write(line) < len(line):  # a full disk accepts part of the line and fails only at the next write
                file.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def read(self) -> list[dict[str, Any]]:
        """Return all records. A last line torn by a crash or still being written is skipped, and this is logged.

        Raises ValueError, naming the line, if any other line is damaged.
        """
        if not self.path.exists():
            return []
        # Text after the last newline is torn even if it parses: 12 may be the start of 123.
        *lines, torn = self.path.read_bytes().split(b"\n")
        records = [_parse(line) for line in lines]
        if records and records[-1] is None and not torn:  # a power loss may leave zeros and a newline
            torn = lines.pop()
            records.pop()
        if None in records:
            number = records.index(None) + 1
            raise ValueError(f"{self.path}: line {number} is damaged; delete that line to continue without it")
        if torn:
            log.warning("%s: line %d is incomplete and was skipped", self.path, len(lines) + 1)
        return [record for record in records if record is not None]

    def truncate_after(self, step: int) -> None:
        """Remove lines of later steps and a torn last line. A run that resumes from `step` writes them again."""
        kept = [to_json(record) + "\n" for record in self.read() if record["step"] <= step]
        replace_file(self.path, "".join(kept).encode())


def _finite(value: Any) -> Any:
    """Return `value` with None in place of every float that JSON cannot represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(record, dict) and isinstance(record.get("step"), int) and isinstance(record.get("split"), str)
    return record if whole else None

"""Reads a CORE eval bundle in nanochat's layout: `core.yaml`, `eval_meta_data.csv` and `eval_data/**.jsonl`."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from ..files import corrupted_file_error

TaskKind = Literal["multiple_choice", "schema", "language_modeling"]
Baselines = Literal["nanochat", "dclm"]

TaskRow = dict[str, Any]

# Chance accuracy in percent, for the tasks where DCLM's newer table differs from the bundle's.
DCLM_BASELINES = {"commonsense_qa": 40.3, "bigbench_language_identification": 25.0, "agi_eval_lsat_ar": 25.0}

# The text fields of each kind of row, and its list of options. The field `gold` is the index of the right option.
TEXTS = {"multiple_choice": ("query",), "schema": ("continuation",), "language_modeling": ("context", "continuation")}
OPTIONS = {"multiple_choice": "choices", "schema": "context_options"}
REMEDY = "download the bundle again"
DELIMITER = " "  # between a question and its answer, unless core.yaml says otherwise


class Task(NamedTuple):
    """One CORE task. shots: number of solved examples in a prompt. delimiter: text between a question and its answer.
    baseline: chance accuracy, for centring. rows: the questions in file order. hash: the file's sha256, in hex.
    """

    label: str
    kind: TaskKind
    shots: int
    delimiter: str
    baseline: float
    rows: Sequence[TaskRow]
    hash: str


def read_bundle(path: str | Path, baselines: Baselines = "nanochat") -> list[Task]:
    """Return all tasks in the bundle's order. Raises ValueError or OSError if `path` is not a bundle or is damaged."""
    index, table, data = (Path(path, name) for name in ("core.yaml", "eval_meta_data.csv", "eval_data"))
    if missing := [needed.name for needed in (index, table, data) if not needed.exists()]:
        raise ValueError(f"{path} is not an eval bundle: {missing[0]} is missing; use another, or run et data core")
    with _damage_reported(index):
        listed: list[TaskRow] = yaml.safe_load(index.read_bytes())["icl_tasks"]
        for entry in listed:
            _require_task(entry)
        entries = {entry["label"]: entry for entry in listed}
    with _damage_reported(table):
        with table.open(encoding="utf-8", newline="") as file:
            chance = {row["Eval Task"]: float(row["Random baseline"]) for row in csv.DictReader(file)}
        chance |= DCLM_BASELINES if baselines == "dclm" else {}
        for label in entries:
            if not 0 <= chance[label] < 100:
                raise ValueError(f"the baseline of {label} is {chance[label]:g} percent, not between 0 and 100")
    return [_task(data / entry["dataset_uri"], entry, chance[label] / 100) for label, entry in entries.items()]


@contextmanager
def _damage_reported(path: Path) -> Iterator[None]:
    """Convert errors about a file's missing or malformed content to a ValueError that names the file."""
    with corrupted_file_error(path, REMEDY):
        try:
            yield
        except (yaml.YAMLError, csv.Error, RecursionError) as error:
            raise ValueError(" ".join(str(error).split())) from None


def _require_task(entry: TaskRow) -> None:
    """Raise ValueError if a field of this entry of core.yaml is missing or invalid."""
    (shots,) = entry["num_fewshot"]
    texts = (entry["label"], entry["dataset_uri"], entry.get("continuation_delimiter", DELIMITER))
    known = entry["icl_task_type"] in TEXTS and type(shots) is int and shots >= 0
    if not known or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"a field of {entry['label']} has an invalid value")
    uri = Path(entry["dataset_uri"])
    if uri.is_absolute() or ".." in uri.parts:
        raise ValueError(f"{uri} points outside the bundle")


def _task(path: Path, entry: TaskRow, baseline: float) -> Task:
    if not path.is_file():
        raise ValueError(f"{path} is missing; {REMEDY}")
    content = path.read_bytes()
    kind = entry["icl_task_type"]
    rows = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not _is_whole(kind, row):
            raise ValueError(f"{path}: line {number} is not a {kind} question; {REMEDY}")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} is empty; {REMEDY}")
    (shots,) = entry["num_fewshot"]
    delimiter = entry.get("continuation_delimiter", DELIMITER)
    return Task(entry["label"], kind, shots, delimiter, baseline, rows, hashlib.sha256(content).hexdigest())


def _is_whole(kind: TaskKind, row: Any) -> bool:
    if not isinstance(row, dict):
        return False
    texts = [row.get(field) for field in TEXTS[kind]]
    if kind in OPTIONS:
        options, gold = row.get(OPTIONS[kind]), row.get("gold")
        if not isinstance(options, list) or type(gold) is not int or not 0 <= gold < len(options):
            return False
        texts += options
    return all(isinstance(text, str) for text in texts) and isinstance(row.get("category"), str | None)

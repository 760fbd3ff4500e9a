"""An eval bundle of CORE in nanochat's layout: `core.yaml`, `eval_meta_data.csv` and `eval_data/**.jsonl`."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import yaml

Kind = Literal["multiple_choice", "schema", "language_modeling"]
Baselines = Literal["nanochat", "dclm"]

Row = dict[str, Any]

# Accuracy by chance in percent, where DCLM's newer table differs from the bundle's.
DCLM_BASELINES = {"commonsense_qa": 40.3, "bigbench_language_identification": 25.0, "agi_eval_lsat_ar": 25.0}

# The fields that a row of each kind must have, and which of them are lists.
FIELDS: dict[Kind, tuple[str, ...]] = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
}
LISTS = ("choices", "context_options")
DELIMITER = " "
"""Separates a question from its answer unless core.yaml says otherwise."""


class Task(NamedTuple):
    """One task of CORE. shots: solved examples in a prompt. delimiter: between a question and its answer. baseline: the
    accuracy by chance, for centring. rows: in the order of the file. hash: sha256 of the file, in hex."""

    label: str
    kind: Kind
    shots: int
    delimiter: str
    baseline: float
    rows: Sequence[Row]
    hash: str


def read_bundle(path: str | Path, baselines: Baselines = "nanochat") -> list[Task]:
    """Return all tasks, in the bundle's order. Raises ValueError or OSError if it is not a bundle or is damaged."""
    path = Path(path)
    for name in ("core.yaml", "eval_meta_data.csv", "eval_data"):
        if not (path / name).exists():
            raise ValueError(
                f"{path}: not an eval bundle, {name} is missing; name a folder that has it, or run et data core"
            )
    entries = {entry["label"]: entry for entry in _entries(path / "core.yaml")}
    chance = _chance(path / "eval_meta_data.csv") | (DCLM_BASELINES if baselines == "dclm" else {})
    tasks = []
    for label, entry in entries.items():
        if label not in chance:
            raise ValueError(f"{path}/eval_meta_data.csv: no baseline for {label}; download the bundle again")
        tasks.append(_task(path / "eval_data" / entry["dataset_uri"], entry, chance[label] / 100))
    return tasks


def _chance(path: Path) -> dict[str, float]:
    with path.open(encoding="utf-8", newline="") as file:
        try:
            chance = {row["Eval Task"]: float(row["Random baseline"]) for row in csv.DictReader(file)}
        except (KeyError, TypeError, ValueError, csv.Error) as error:
            raise ValueError(f"{path}: damaged ({error!r}); download the bundle again") from None
    for label, percent in chance.items():
        if not 0 <= percent < 100:
            raise ValueError(f"{path}: the baseline of {label} is {percent:g} percent; download the bundle again")
    return chance


def _task(path: Path, entry: Row, baseline: float) -> Task:
    if not path.is_file():
        raise ValueError(f"{path}: the file is missing; download the bundle again")
    content = path.read_bytes()
    kind = entry["icl_task_type"]
    rows = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not _is_whole(kind, row):
            raise ValueError(f"{path}: line {number} is not a {kind} question; download the bundle again")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: empty; download the bundle again")
    (shots,) = entry["num_fewshot"]
    delimiter = entry.get("continuation_delimiter", DELIMITER)
    return Task(entry["label"], kind, shots, delimiter, baseline, rows, hashlib.sha256(content).hexdigest())


def _is_whole(kind: Kind, row: Any) -> bool:
    if not isinstance(row, dict) or not all(field in row for field in FIELDS[kind]):
        return False
    for field in FIELDS[kind]:
        texts = row[field] if field in LISTS else [row[field]]
        if field == "gold":
            continue
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            return False
        if field in LISTS and not (type(row["gold"]) is int and 0 <= row["gold"] < len(texts)):
            return False
    return isinstance(row.get("category"), str | None)


def _entries(path: Path) -> list[Row]:
    """Return the list `icl_tasks` of core.yaml."""
    try:
        content = yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"{path}: cannot be parsed ({problem}); download the bundle again") from None
    entries = content.get("icl_tasks") if isinstance(content, dict) else None
    if not (isinstance(entries, list) and entries):
        raise ValueError(f"{path}: has no icl_tasks; download the bundle again")
    for place, entry in enumerate(entries, start=1):
        if not isinstance(entry, dict):
            raise ValueError(f"{path}: task {place} is no mapping; download the bundle again")
        shots = entry.get("num_fewshot")
        whole = isinstance(shots, list) and len(shots) == 1 and type(shots[0]) is int and shots[0] >= 0
        known = all(isinstance(entry.get(name), str) for name in ("label", "dataset_uri", "icl_task_type"))
        if not (whole and known and entry["icl_task_type"] in get_args(Kind)):
            name = entry.get("label", f"task {place}")
            raise ValueError(f"{path}: {name} lacks label, dataset_uri, num_fewshot or a known icl_task_type")
        if not isinstance(entry.get("continuation_delimiter", ""), str):
            raise ValueError(f"{path}: the continuation_delimiter of {entry['label']} is no text")
    return entries

"""The table of stages, in the order of what is worth most, and the summary of what they found."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NamedTuple

from .record import DONE, FAILURES, Record

SHOWN = 3  # failures shown of each stage; results.json has all


class Entry(NamedTuple):
    """share: of the time, beside the other stages that are still to run. help: what the stage finds, in one line."""

    share: float
    help: str


STAGES = {
    "ceilings": Entry(0.3, "what the card can do: bfloat16 products, a copy, a read"),
    "correctness": Entry(2.0, "every rule and backend against float64, graphs, compiling, decoding, resuming"),
    "layer": Entry(2.2, "the layer of experts beside dense, plain PyTorch and peers; tiles are tuned"),
    "parts": Entry(0.6, "selection, rules, cross-entropy, Muon and attention beside their floors"),
    "step": Entry(1.6, "a whole step of d12 and d20 by dispatch: tokens/s and MFU, eager, captured, compiled"),
    "training": Entry(2.0, "small runs of every method with the same seeds"),
    "decoding": Entry(0.5, "one sequence and 64, beside reading the active weights once"),
    "compile": Entry(0.5, "registers, spills and shared memory for sm_80, sm_90, sm_100; needs no card"),
}
NEEDS_NO_CARD = ("compile",)


def module_of(stage: str) -> Any:
    """Import a stage, in the process that runs it.

    Its `cases(setting)` yields the cases in the order of what is worth most; its `lines(rows)` returns a few lines
    about the measured ones, for the summary.
    """
    return importlib.import_module(f".{stage}", __package__)


def summarise(folder: Path) -> str:
    """Return the summary of a folder as Markdown, of one screen."""
    found = [record for stage in STAGES if (record := Record(folder, stage)).facts]
    if not found:
        return "Nothing was measured."
    facts = found[0].facts
    where = facts["gpu"] or "CPU, toy sizes: these numbers mean nothing"
    versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "cuda", "triton") if facts.get(name))
    lines = [f"# {where}", "", f"{versions}; commit {str(facts['commit'])[:9]}, {facts['date']}"]
    return "\n".join([*lines, *(line for record in found for line in about(record, facts["code"])), ""])


def about(record: Record, code: str) -> list[str]:
    """Return a stage's lines: its counts, its numbers, its first failures."""
    counts = ", ".join(f"{n} {status}" for status in (*DONE, "not run") if (n := len(record.having(status))))
    other = "" if record.facts["code"] == code else f"; by other code, commit {record.facts['commit']}"
    unfinished = "" if record.complete else "; incomplete"
    failed = record.having(*FAILURES)
    failures = [f"{row['status'].upper()} {name}: {row['reason']}" for name, row in failed.items()]
    more = [f"… and {len(failures) - SHOWN} more failures"] if len(failures) > SHOWN else []
    rows = record.having("measured")
    lines = [*(module_of(record.stage).lines(rows) if rows else []), *failures[:SHOWN], *more]
    return ["", f"## {record.stage}: {counts or 'nothing'}{other}{unfinished}", "", *(f"- {line}" for line in lines)]

"""The screen at the end, and SUMMARY.md: what each stage that was run has to say."""

from __future__ import annotations

from pathlib import Path

from .record import DONE, FAILURES, Record
from .setting import Row
from .stages import STAGES, module_of

SAID = 3  # failures told of each stage; its JSON has all


def summarise(folder: Path) -> str:
    """Return the summary of a folder as Markdown, of one screen."""
    found = [record for stage in STAGES if (record := Record(folder, stage)).path.exists()]
    if not found:
        return "Nothing was measured."
    return "\n".join([headline(found[0].facts), *(line for record in found for line in about(record))]) + "\n"


def headline(facts: Row) -> str:
    """Return the machine in one line."""
    where = facts["gpu"] or "CPU, toy sizes: these numbers mean nothing"
    versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "cuda", "triton") if facts.get(name))
    return f"# {where}\n\n{versions}; commit {str(facts['commit'])[:9]}, {facts['date']}"


def about(record: Record) -> list[str]:
    """Return a stage's lines: its counts, its numbers, its first failures."""
    counts = ", ".join(f"{n} {status}" for status in (*DONE, "not run")
                       if (n := record.count(status)))  # fmt: skip
    unfinished = "" if record.complete else "; incomplete"
    failures = [f"{row['status'].upper()} {name}: {row['reason']}" for name, row in record.cases.items()
                if row["status"] in FAILURES]  # fmt: skip
    more = [f"… and {len(failures) - SAID} more failures"] if len(failures) > SAID else []
    rows = record.measured()
    said = module_of(record.stage).lines(rows) if rows else []
    return ["", f"## {record.stage}: {counts or 'nothing'}{unfinished}", "",
            *(f"- {line}" for line in [*said, *failures[:SAID], *more])]  # fmt: skip

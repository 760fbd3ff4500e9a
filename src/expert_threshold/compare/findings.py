"""Results of a comparison: runs judged against a baseline, as tables in JSON, CSV and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..analysis.results import HEADERS, NOTES, Result, cells, markdown, summarise, to_csv
from ..files import replace_file, replace_json
from . import judgement
from .judgement import Judged, judge, judged_cells, load_cells, notes


@dataclass(frozen=True)
class Findings:
    """The results of finished runs, and their comparison with a baseline.

    folders: of each method's runs. baseline: the method that others
    are judged against, within the margin in nats per token. timed: the runs' seconds compare, since they come from one
    machine.
    """

    headline: str
    results: Sequence[Result]
    folders: Mapping[str, Sequence[Path]]
    baseline: str
    margin: float
    timed: bool = True

    @cached_property
    def judged(self) -> list[Judged]:
        """Each method against the baseline."""
        return judge(self.results, self.baseline, self.margin, timed=self.timed)

    def tables(self, emphasise: Callable[[str], str]) -> list[tuple[Sequence[str], list[list[str]], str]]:
        """Return the head, the cells and the explanation of each table; the best losses are passed to `emphasise`."""
        return [
            (HEADERS, cells(summarise(self.results), emphasise), NOTES),
            (judgement.HEADERS, judged_cells(self.judged, self.baseline), ""),
            (judgement.LOADS, load_cells(self.results), notes(self.judged, self.baseline, self.margin)),
        ]

    def write(self, folder: Path, file: str) -> None:
        """Write the tables as JSON, into that file, as CSV and as Markdown."""
        rows = summarise(self.results)
        content = {
            "headline": self.headline,
            "table": [row._asdict() for row in rows],
            "baseline": self.baseline,
            "margin": self.margin,
            "judgement": [row.record() for row in self.judged],
            "runs": [result._asdict() for result in self.results],
        }
        tables = [
            markdown(head, lines) + (note and f"\n{note}\n")
            for head, lines, note in self.tables(lambda text: f"**{text}**")
        ]
        replace_json(folder / file, content)
        replace_file(folder / "compare.csv", to_csv(rows).encode())
        replace_file(folder / "compare.md", "\n".join([f"{self.headline}\n", *tables]).encode())

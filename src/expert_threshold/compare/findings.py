"""Compares the runs of a comparison with a baseline, and writes tables as JSON, CSV and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from ..analysis.methods import seed_of
from ..analysis.records import Result, Run, damaged, read_run
from ..analysis.results import HEADERS, NOTES, cells, markdown, summarise, to_csv
from ..config import SECTIONS
from ..files import replace_file, replace_json
from ..recipes import methods
from ..runs import RunFolder
from . import judgement
from .experiment import KnownText
from .judgement import Judged, judge, judged_cells, load_cells, notes


def text_of(run: Run) -> KnownText:
    """Return the text that the run was trained on."""
    folder = run.folder
    return KnownText(run.config["corpus"]["hash"], folder.tokenizer().hash, run.config["data"].get("train_shards"))


def read_runs(folder: Path) -> list[Run]:
    """Return the runs in folder/METHOD/seed_N, sorted by method, in the usual order, and by seed.

    Raises ValueError if a run is damaged.
    """
    found = []
    for path in sorted(folder.glob("*/seed_*/config.json")):
        if (seed := seed_of(path.parent)) is not None:
            opened = RunFolder.open(path.parent)
            for section in (*SECTIONS, "corpus", "machine", "versions"):
                opened.section(section)  # raises ValueError if a section is missing
            if (own := opened.config["train"].get("seed")) != seed:  # a copy would count as another seed
                raise ValueError(f"{opened.path} contains a run with seed {own}; remove it, or rename it to seed_{own}")
            with damaged(opened):
                found.append(read_run(opened, path.parent.parent.name))
            _ = found[-1].result  # raises ValueError if a record is damaged
    place = {method: number for number, method in enumerate(methods())}
    return sorted(found, key=lambda run: (place.get(run.method, len(place)), run.method, run.seed))


@dataclass(frozen=True)
class Findings:
    """The results of finished runs and their comparison with a baseline. margin: the equivalence margin, in nats."""

    headline: str
    runs: Sequence[Run]
    baseline: str
    margin: float

    @cached_property
    def results(self) -> list[Result]:
        return [run.result for run in self.runs if run.result is not None]

    @cached_property
    def judged(self) -> list[Judged]:
        """Each method compared with the baseline. Seconds are compared only if all runs used one machine."""
        machines = {tuple(run.config["machine"][name] for name in ("cpu", "gpu", "threads")) for run in self.runs}
        return judge(self.results, self.baseline, self.margin, timed=len(machines) < 2)

    def tables(self, emphasise: Callable[[str], str]) -> list[tuple[Sequence[str], list[list[str]], str]]:
        """Return the headings, cells and explanation of each table. The best losses are passed through `emphasise`."""
        return [
            (HEADERS, cells(summarise(self.results), emphasise), NOTES),
            (judgement.HEADERS, judged_cells(self.judged, self.baseline), ""),
            (judgement.LOADS, load_cells(self.results), notes(self.judged, self.baseline, self.margin)),
        ]

    def write(self, folder: Path, file: str) -> None:
        """Write the tables to `file` as JSON, and to compare.csv and compare.md."""
        rows = summarise(self.results)
        content = {
            "headline": self.headline,
            "table": rows,
            "baseline": self.baseline,
            "margin": self.margin,
            "judgement": [asdict(row) for row in self.judged],
            "runs": [result._asdict() for result in self.results],
        }
        tables = [
            markdown(head, lines) + (note and f"\n{note}\n")
            for head, lines, note in self.tables(lambda text: f"**{text}**")
        ]
        replace_json(folder / file, content)
        replace_file(folder / "compare.csv", to_csv(rows).encode())
        replace_file(folder / "compare.md", "\n".join([f"{self.headline}\n", *tables]).encode())

"""Comparisons: methods trained with the same budget, data order and seeds, in one folder with a table of results."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from .analysis.comparison import NOTES, Result, curves, read_result, summarise, to_csv, to_markdown
from .analysis.figures.learning import draw_loss_by_method
from .analysis.page import save_figure
from .analysis.sentences import short
from .config import RunConfig
from .data import open_source
from .experiment import Kind, record_corpus, run_title
from .full_run import train_run
from .plan import costs, window
from .routing import DENSE
from .runs import RunFolder
from .runs.files import replace_file, to_json

COMPARISON = Kind("comparison", "compare.json")


class Comparison(NamedTuple):
    """Runs of several methods in folder/METHOD/seed_N, and the files that summarize them."""

    folder: Path
    configs: Mapping[str, RunConfig]  # by method, with seed 0
    seeds: int
    record: dict[str, Any]  # that of compare.json, without results

    def read_corpus(self) -> None:
        """Add the corpus to the record. Raises ValueError if it cannot be read or has changed since."""
        data = next(iter(self.configs.values())).data
        record_corpus(self.record, open_source(**asdict(data)), self.folder)

    def run_path(self, method: str, seed: int) -> Path:
        """Return the run's folder."""
        return self.folder / method / f"seed_{seed}"

    def results(self) -> list[Result]:
        """Return the result of each finished run, by method and seed."""
        found = []
        for method in self.configs:
            for seed in range(self.seeds):
                path = self.run_path(method, seed)
                if _is_begun(path) and (result := read_result(RunFolder.open(path), method, seed)):
                    found.append(result)
        return found

    def train(self, console: Console) -> None:
        """Train every unfinished run, all methods of one seed before the next seed; a run already begun is resumed.

        Raises KeyboardInterrupt after a run that a signal stopped, ValueError and OSError as `train` does.
        """
        done = {(result.method, result.seed) for result in self.results()}
        runs = [(method, seed) for seed in range(self.seeds) for method in self.configs]
        seconds: list[float] = []
        for number, (method, seed) in enumerate(runs, start=1):
            if (method, seed) in done:
                continue
            start = time.monotonic()
            later = sum(run not in done for run in runs[number:])
            title = run_title(f"{number}/{len(runs)} {method} seed {seed}", start, seconds, later)
            path, config = self.run_path(method, seed), self.configs[method]
            path.mkdir(parents=True, exist_ok=True)
            result = train_run(
                RunFolder(path),
                replace(config, train=replace(config.train, seed=seed)),
                console,
                resume=_is_begun(path),
                title=title,
            )
            if not result.finished:
                raise KeyboardInterrupt
            seconds.append(time.monotonic() - start)
            self.write()

    def write(self) -> None:
        """Write the table of the runs finished so far, as JSON, CSV and Markdown."""
        results = self.results()
        rows = summarise(results)
        record = self.record | {
            "table": [row._asdict() for row in rows],
            "runs": [result._asdict() for result in results],
        }
        for name, text in (
            (COMPARISON.file, to_json(record, indent=2) + "\n"),
            ("compare.csv", to_csv(rows)),
            ("compare.md", f"{self.headline()}\n\n{to_markdown(rows)}\n{NOTES}\n"),
        ):
            replace_file(self.folder / name, text.encode())

    def headline(self) -> str:
        """Return a line on the text, the budget and the machines."""
        cost = costs(next(iter(self.configs.values())))
        options = self.record["options"]
        start, corpus = " with ".join(options["run"].values()), Path(options["data"]["source"]).name
        machines = "; ".join(
            f"{m['gpu'] or m['cpu']}, threads: {m['threads']}, torch {m['torch']}" for m in self.record["machines"]
        )
        return (
            f"{start} on {corpus}: {cost['steps']:,} steps of {cost['tokens_per_step']:,} tokens = "
            f"{short(cost['tokens'])} tokens; {machines}"
        )

    def draw(self) -> None:
        """Draw the validation losses over the tokens. Raises ValueError if matplotlib is missing."""
        methods = [
            {"method": self.label(method), "kind": method, "points": points}
            for method, points in curves(self.results()).items()
        ]
        save_figure(draw_loss_by_method({"methods": methods}), self.folder / "loss_by_method")

    def label(self, method: str) -> str:
        """Return the method's name in figures, which is its rule's label."""
        config = self.configs[method]
        return DENSE if config.model.rule is None else config.model.rule.label_of(window(config).pool)


def _is_begun(path: Path) -> bool:
    return (path / "config.json").is_file()

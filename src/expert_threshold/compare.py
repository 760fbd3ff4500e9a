"""Comparisons: methods trained with the same budget, data order and seeds, in one folder with a table of results."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from rich.console import Console

from . import __version__
from .analysis.comparison import NOTES, Result, curves, read_result, summarise, to_csv, to_markdown
from .analysis.figures.learning import draw_loss_by_method
from .analysis.page import save_figure
from .analysis.sentences import short
from .config import RunConfig
from .data import open_source
from .full_run import train_run
from .plan import costs, window
from .routing import DENSE, rule_to_dict
from .runs import RunFolder
from .runs.files import damage_told, read_json, replace_file, to_json
from .runs.lock import LOCK, exclusive, is_vacant
from .train.device import machine, pick_device
from .train.log import Title, clock

FORMAT, VERSION = "expert-threshold comparison", 1
OTHER_FOLDER = "restore it from a copy, or name another --out"


@contextmanager
def opened(out: str) -> Iterator[Path]:
    """Make or find the folder of a comparison, and lock it for this process; a new folder left empty is removed.

    Raises ValueError if it exists and is not a comparison.
    """
    folder = Path(out)
    begun = (folder / "compare.json").is_file()
    if folder.exists() and not begun and not (folder.is_dir() and is_vacant(folder)):
        raise ValueError(f"--out {folder}: already exists and is not a comparison; name another --out")
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with exclusive(folder / LOCK):
            yield folder
    finally:
        if made:
            with suppress(OSError):
                folder.rmdir()  # succeeds only if nothing was written yet


class Comparison(NamedTuple):
    """Runs of several methods in folder/METHOD/seed_N, and the files that summarize them."""

    folder: Path
    configs: Mapping[str, RunConfig]  # by method, with seed 0
    seeds: int
    record: dict[str, Any]  # that of compare.json, without results

    def read_corpus(self) -> None:
        """Add the corpus to the record. Raises ValueError if it cannot be read or has changed since."""
        data = next(iter(self.configs.values())).data
        corpus = open_source(**asdict(data))
        before = self.record["corpus"]
        if before is not None and before["hash"] != corpus.hash:
            raise ValueError(
                f"{corpus.name} has changed since {self.folder} began; restore the text, or name another --out"
            )
        self.record["corpus"] = {"name": corpus.name, "hash": corpus.hash, "bytes": corpus.bytes}

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
            ("compare.json", to_json(record, indent=2) + "\n"),
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


def read_record(out: Path, start: Mapping[str, str], configs: Mapping[str, RunConfig]) -> dict[str, Any]:
    """Return all options of the comparison, as in compare.json. Raises ValueError if an existing file differs.

    Without an existing compare.json, the corpus is None until `Comparison.read_corpus`.
    """
    sections = next(iter(configs.values())).to_dict()
    del sections["model"]["rule"], sections["train"]["seed"]
    # Derived options come last, so that an error names the option that was typed.
    options = {"run": start} | {name: sections[name] for name in ("train", "data", "model", "optim")}
    here = machine(pick_device(sections["train"]["device"]), sections["train"]["threads"]) | {
        "expert_threshold": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    now: dict[str, Any] = json.loads(
        to_json(
            {
                "format": FORMAT,
                "version": VERSION,
                "options": options,
                "methods": {name: rule_to_dict(config.model.rule) for name, config in configs.items()},
                "corpus": None,
                "machines": [here],
            }
        )
    )
    path = out / "compare.json"
    if not path.exists():
        return now
    before = read_json(path)
    if (before.get("format"), before.get("version")) != (FORMAT, VERSION):
        raise ValueError(f"{path}: not written by this version of expert-threshold, or damaged; {OTHER_FOLDER}")
    with damage_told(path, OTHER_FOLDER):
        sections = before["options"] | before["methods"]
        machines = [{name: machine[name] for name in here} for machine in before["machines"]]
        known = now | {
            "methods": before["methods"] | now["methods"],
            "corpus": {name: before["corpus"][name] for name in ("name", "hash", "bytes")},
            "machines": [*(machine for machine in machines if machine != here), here],
        }
        pairs = [
            (option, value, sections.get(name, section).get(option))
            for name, section in (now["options"] | now["methods"]).items()
            for option, value in section.items()
        ]
    for option, value, was in pairs:
        if value != was:
            raise ValueError(
                f"{option}={value!r} differs from {was!r}, with which {out} began; keep the old value, "
                "or name another --out"
            )
    return known


def _is_begun(path: Path) -> bool:
    return (path / "config.json").is_file()


def run_title(label: str, start: float, seconds: Sequence[float], later: int) -> Title:
    """Return the opening of a run's progress lines. seconds: of earlier runs; later: the number of runs to follow."""

    def title(left: float | None) -> str:
        if left is None:
            return label
        total = time.monotonic() - start + left
        return f"{label} ({clock(left + later * mean([*seconds, total]))} left in all)"

    return title

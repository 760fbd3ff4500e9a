"""`et compare`: train several methods with the same budget, data order and seeds, and say what each reached."""

from __future__ import annotations

import json
import platform
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..analysis.comparison import (
    HEADERS,
    NOTES,
    Result,
    cells,
    curves,
    read_result,
    summarise,
    to_csv,
    to_markdown,
)
from ..analysis.figures import loss_by_method
from ..analysis.page import save_figure
from ..analysis.sentences import short
from ..config import DEFAULT_PRESET, RunConfig
from ..data import open_source
from ..data.sources import absolute
from ..install import et
from ..plan import costs
from ..recipes import METHODS, Method
from ..routing import RULES, option_names, rule_to_dict
from ..runs import RunFolder
from ..runs.files import damage_told, read_json, replace_file, to_json
from ..runs.lock import LOCK, exclusive, is_vacant
from ..train.checks import require_trainable
from ..train.device import keep_freed_memory, machine, pick_device
from ..train.log import Title, clock
from .options import Option, parse_names
from .run_options import RULE, Given, parse_run, resolve_run, rules_having, start_of
from .train import train_run


def methods() -> dict[str, Method]:
    """Return the methods that can be compared, by name: the paper's, and each other rule as it is by default."""
    covered = {method.rule for method in METHODS.values()}
    others = {name: cls.summary().rstrip(".") for name, cls in RULES.items() if name not in covered}
    return METHODS | {name: Method(name, {}, summary, len(METHODS)) for name, summary in others.items()}


def leaves_open(method: Method, option: str) -> bool:
    """Return True if this option of the method's rule can be chosen."""
    return option in option_names(method.rule) and option not in method.options


def _description() -> str:
    return "Train several methods with the same budget, data order and seeds, and say what each reached.\n\n" + (
        "\n\n".join(f"{name}: {method.summary}." for name, method in methods().items())
    )


PAPER, ALL = "paper", "all"
OPTIONS = [
    Option(
        "rules",
        str,
        PAPER,
        "The methods to compare, as A,B; paper is the paper's, all is every rule's as well. Options of rules go to "
        "those that leave them open.",
    ),
    Option("seeds", int, 1, "Train each method so many times, with seed 0, 1, and so on."),
    Option("out", str, "runs/compare-PRESET", "The folder to make, or of the comparison to go on with."),
]


def _decided() -> set[str]:
    """Options of a run that --rules and --seeds decide."""
    every = methods().values()
    return {"recipe", "rule", "seed"} | {
        RULE + option for option in rules_having() if not any(leaves_open(method, option) for method in every)
    }


FORMAT, VERSION = "expert-threshold comparison", 1
OTHER_FOLDER = "restore it from a copy, or name another --out"


def run(arguments: Sequence[str]) -> None:
    """Train what is not trained yet, and show the table."""
    given = parse_run("et compare", _description(), OPTIONS, arguments, without=_decided())
    chosen = chosen_methods(given.pop("rules", PAPER))
    seeds = given.pop("seeds", 1)
    if seeds < 1:
        raise ValueError(f"--seeds {seeds}: must be at least 1")
    out = given.pop("out", f"runs/compare-{given.get('preset', DEFAULT_PRESET)}")
    configs = configure(given, chosen)
    keep_freed_memory()
    console = Console() if Console().is_terminal else Console(width=120)
    with _opened(out) as folder:
        comparison = Comparison(folder, configs, seeds, _record(folder, start_of(given), configs))
        console.print(comparison.introduction(), markup=False, highlight=False, soft_wrap=True)
        comparison.read_corpus()
        comparison.write()
        try:
            comparison.train(console)
        except KeyboardInterrupt:
            again = f"{et()} {shlex.join(['compare', *arguments])}"
            console.print(f"to go on with the comparison: {again}", markup=False, highlight=False, soft_wrap=True)
            raise
        console.print(comparison.table())
        console.print(NOTES, markup=False, highlight=False)
        console.print(comparison.conclude(), markup=False, highlight=False, soft_wrap=True)


def chosen_methods(text: str) -> list[str]:
    """The methods that --rules names, in the order of `methods`. Raises ValueError as `parse_names` does."""
    known = methods()
    names = list({PAPER: METHODS, ALL: known}.get(text, ())) or parse_names("--rules", text, known)
    return [method for method in known if method in names]


def configure(given: Given, names: Sequence[str]) -> dict[str, RunConfig]:
    """The run of each method with seed 0. Raises ValueError for whatever could not train or not be compared."""
    known = methods()
    of_rules = [key for key in given if key.startswith(RULE)]
    for key in of_rules:
        option = key.removeprefix(RULE)
        if not any(leaves_open(known[name], option) for name in names):
            flag = "--" + option.replace("_", "-")
            raise ValueError(f"{flag} {given[key]}: not an option of {', '.join(names)}; leave it out")
    configs = {}
    for name in names:
        method = known[name]
        closed = [key for key in of_rules if not leaves_open(method, key.removeprefix(RULE))]
        own = {key: value for key, value in given.items() if key not in closed}
        fixed = {RULE + option: value for option, value in method.options.items()}
        config = resolve_run(own | {"rule": method.rule, "seed": 0} | fixed)
        require_trainable(config.model, config.train)
        configs[name] = replace(config, data=replace(config.data, source=absolute(config.data.source)))
    if config.train.eval_every is None:
        raise ValueError("--eval-every none: methods are compared by their validation loss; leave it out")
    return configs


@contextmanager
def _opened(out: str) -> Iterator[Path]:
    """The folder of a comparison, made or found, for this process alone; not left behind empty."""
    if not out:
        raise ValueError("--out is empty; name a folder")
    folder = Path(out)
    begun = (folder / "compare.json").is_file()
    if folder.exists() and not begun and not (folder.is_dir() and is_vacant(folder)):
        raise ValueError(f"--out {folder}: already exists and is no comparison; name another --out")
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with exclusive(folder / LOCK):
            yield folder
    finally:
        if made:
            with suppress(OSError):
                folder.rmdir()  # goes only if nothing was written yet


def _record(out: Path, start: Mapping[str, str], configs: Mapping[str, RunConfig]) -> dict[str, Any]:
    """What decides the comparison, as compare.json has it. Raises ValueError where it differs from what is there.

    The corpus is None until `Comparison.read_corpus` where compare.json is not there yet.
    """
    sections = next(iter(configs.values())).to_dict()
    del sections["model"]["rule"], sections["train"]["seed"]
    # What follows from other options comes after them, so that a difference is told of what was typed.
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
                f"{option}={value!r} differs from {was!r}, with which {out} began; leave it as it was, "
                "or name another --out"
            )
    return known


class Comparison(NamedTuple):
    """Runs of several methods in folder/METHOD/seed_N, and the files that sum them up."""

    folder: Path
    configs: Mapping[str, RunConfig]  # by method, with seed 0
    seeds: int
    record: dict[str, Any]  # of compare.json, without results

    def read_corpus(self) -> None:
        """Put the text in the record. Raises ValueError where it cannot be read, or has changed since."""
        data = next(iter(self.configs.values())).data
        corpus = open_source(**asdict(data))
        before = self.record["corpus"]
        if before is not None and before["hash"] != corpus.hash:
            raise ValueError(
                f"{corpus.name} has changed since {self.folder} began; restore the text, or name another --out"
            )
        self.record["corpus"] = {"name": corpus.name, "hash": corpus.hash, "bytes": corpus.bytes}

    def run_path(self, method: str, seed: int) -> Path:
        return self.folder / method / f"seed_{seed}"

    def results(self) -> list[Result]:
        """Of the runs that are finished, by method and seed."""
        found = []
        for method in self.configs:
            for seed in range(self.seeds):
                path = self.run_path(method, seed)
                if _is_begun(path) and (result := read_result(RunFolder.open(path), method, seed)):
                    found.append(result)
        return found

    def train(self, console: Console) -> None:
        """Every run that is not finished, all methods of one seed before the next seed; one that is begun goes on.

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
        """The table of what is finished by now, as JSON, CSV and Markdown."""
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

    def introduction(self) -> str:
        """How much there is to do."""
        runs = len(self.configs) * self.seeds
        return f"{self.headline()}\nmethods × seeds: {len(self.configs)} × {self.seeds} = {runs} runs in {self.folder}"

    def headline(self) -> str:
        """On what, for how long and where."""
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

    def table(self) -> Table:
        """For the terminal. Where that is narrow the methods' names are folded; numbers never are."""
        lines = cells(summarise(self.results()), lambda text: f"[bold]{text}[/bold]")
        table = Table(HEADERS[0], box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
        table.columns[0].overflow = "fold"
        for header, texts in zip(HEADERS[1:], list(zip(*lines, strict=True))[1:], strict=True):
            words = map(len, header.split())
            width = max(min(len(header), 8), *words, *(Text.from_markup(text).cell_len for text in texts))
            table.add_column(header, justify="right", width=width)
        for line in lines:
            table.add_row(*line)
        return table

    def conclude(self) -> str:
        """Draw the figure, and tell where all of it lies."""
        try:
            methods = [{"method": m, "kind": m, "points": points} for m, points in curves(self.results()).items()]
            save_figure(loss_by_method({"methods": methods}), self.folder / "loss_by_method")
        except ValueError as missing:
            return f"all of it lies in {self.folder}, but no figure: {missing}"
        path = shlex.quote(str(self.folder))
        return (
            f"all of it lies in {self.folder}: compare.md, .csv and .json, loss_by_method.png and .svg\n"
            f"next: {et()} analyze {path}"
        )


def _is_begun(path: Path) -> bool:
    return (path / "config.json").is_file()


def run_title(label: str, start: float, seconds: Sequence[float], later: int) -> Title:
    """What opens a run's lines. seconds: what earlier runs took; later: how many runs follow."""

    def title(left: float | None) -> str:
        if left is None:
            return label
        total = time.monotonic() - start + left
        return f"{label} ({clock(left + later * mean([*seconds, total]))} left in all)"

    return title

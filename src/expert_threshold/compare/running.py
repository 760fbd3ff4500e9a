"""Comparisons: methods trained with the same budget, data order and seeds, in one folder with a table of results."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from ..analysis.figures.learning import draw_losses
from ..analysis.methods import seed_of
from ..analysis.page import save_figure
from ..analysis.results import (
    NOTES,
    Result,
    curves,
    markdown,
    names_with_sizes,
    read_result,
    result_from,
    sizes,
    summarise,
    to_csv,
    to_markdown,
)
from ..analysis.sentences import counted, listed, short
from ..config import RunConfig
from ..data import open_source
from ..files import corrupted_file_error, read_json, replace_file, replace_json
from ..full_run import train_run
from ..plan import costs, window
from ..routing import DENSE
from ..runs import RunFolder
from ..train import DivergedError, Text
from ..train.log import say
from .experiment import (
    Kind,
    read_shared_text,
    record_corpus,
    record_machine,
    require_format,
    run_title,
    with_recorded_shards,
)
from .judgement import HEADERS, LOADS, MARGIN, Judged, chosen_baseline, judge, judged_cells, load_cells, notes
from .page import comparison_page, draw_differences
from .traffic import bytes_sent

COMPARISON, JOINED = Kind("comparison", "compare.json"), Kind("joined comparison", "joined.json")
ELSEWHERE = "repeat its et compare, restore it from a copy, or leave it out of --join"


class Findings(NamedTuple):
    """The results of finished runs, and their comparison with a baseline.

    costs: by method, `bytes_sent` and `state_bytes`. baseline: the method that others are judged against, within the
    margin in nats per token. timed: the runs' seconds compare, since they come from one machine.
    """

    headline: str
    results: Sequence[Result]
    costs: Mapping[str, Mapping[str, Any]]
    baseline: str
    margin: float = MARGIN
    timed: bool = True

    def write(self, folder: Path, record: Mapping[str, Any], file: str = COMPARISON.file) -> None:
        """Write the tables as JSON, CSV and Markdown. record: what else the JSON holds. file: its name."""
        rows, judged = summarise(self.results), self.judged()
        content = {
            "table": [row._asdict() for row in rows],
            "baseline": self.baseline,
            "margin": self.margin,
            "judgement": [row.record() for row in judged],
            "costs": self.costs,
            "runs": [result._asdict() for result in self.results],
        }
        parts = [
            self.headline,
            to_markdown(rows) + "\n" + NOTES,
            markdown(HEADERS, judged_cells(judged, self.baseline)),
            markdown(LOADS, load_cells(self.results, self.costs)) + "\n" + notes(self.baseline, self.margin),
        ]
        replace_json(folder / file, {**record, **content})
        replace_file(folder / "compare.csv", to_csv(rows).encode())
        replace_file(folder / "compare.md", ("\n\n".join(parts) + "\n").encode())

    def judged(self) -> list[Judged]:
        """Return each method against the baseline."""
        return judge(self.results, self.baseline, self.margin, timed=self.timed)

    def draw(self, folder: Path, labels: Mapping[str, str]) -> list[str]:
        """Write the page, and its main figures as files, and return their names.

        labels: the methods' names in the figure of losses. Raises ValueError if matplotlib is missing.
        """
        methods = [
            {"method": labels.get(method, method), "kind": method, "points": points}
            for method, points in curves(self.results).items()
        ]
        judged = self.judged()
        figures = {"loss_by_method": partial(draw_losses, {"methods": methods})}
        if any(row.difference is not None for row in judged):
            figures["differences"] = partial(draw_differences, judged, self.baseline, self.margin)
        for name, figure in figures.items():
            save_figure(figure, folder / name)
        text = comparison_page(self.headline, self.results, judged, self.baseline, self.margin, self.costs, folder)
        replace_file(folder / "compare.html", text.encode())
        return list(figures)


class Comparison(NamedTuple):
    """Runs of several methods in folder/METHOD/seed_N, and the files that summarize them."""

    folder: Path
    configs: Mapping[str, RunConfig]  # by method, with seed 0
    seeds: int
    record: dict[str, Any]  # that of compare.json, without results
    baseline: str
    margin: float = MARGIN

    def read_corpus(self) -> None:
        """Add the corpus to the record. Raises ValueError if it cannot be read or has changed since."""
        data = with_recorded_shards(self.record, next(iter(self.configs.values())).data)
        record_corpus(self.record, open_source(**asdict(data)), self.folder)

    def run_path(self, method: str, seed: int) -> Path:
        """Return the run's folder."""
        return self.folder / method / f"seed_{seed}"

    def results(self) -> list[Result]:
        """Return the result of each run that finished or diverged, by method and seed, earlier ones included."""
        begun = [(method, seed) for method in self.record["methods"] for seed in self._begun(method)]
        found = (read_result(RunFolder.open(self.run_path(*run)), *run) for run in begun)
        return [result for result in found if result is not None]

    def _begun(self, method: str) -> list[int]:
        """Return the seeds of the method's runs that have begun."""
        seeds = (seed_of(path.parent) for path in (self.folder / method).glob("seed_*/config.json"))
        return sorted(seed for seed in seeds if seed is not None)

    def _config(self, method: str) -> RunConfig:
        """Return a run of the method, which may be an earlier one's."""
        if method in self.configs:
            return self.configs[method]
        return RunConfig.from_dict(RunFolder.open(self.run_path(method, self._begun(method)[0])).config)

    def train(self, console: Console) -> None:
        """Train every unfinished run, all methods of one seed before the next seed; a run already begun is resumed.

        A run that diverges has no loss, and the others follow. New runs share a text that is read once. Raises
        KeyboardInterrupt after a run that a signal stopped, ValueError and OSError as `train` does.
        """
        text: Text | None = None
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
            config = replace(config, data=with_recorded_shards(self.record, config.data))
            begun = _is_begun(path)
            if text is None and not begun:
                text = read_shared_text(self.record, config, self.folder, console)
            path.mkdir(parents=True, exist_ok=True)
            record_machine(self.record, config)
            dtype = self.record["options"]["train"]["dtype"]
            try:
                result = train_run(
                    RunFolder(path),
                    replace(config, train=replace(config.train, seed=seed, dtype=dtype)),
                    console,
                    resume=begun,
                    title=title,
                    text=None if begun else text,
                )
            except DivergedError as error:
                say(console, f"{method} seed {seed} diverged: {error}; to train it again, remove {path}")
            else:
                if not result.finished:
                    raise KeyboardInterrupt
            seconds.append(time.monotonic() - start)
            self.write()

    def write(self) -> None:
        """Write the tables of the runs finished so far."""
        self.findings().write(self.folder, self.record)

    def findings(self) -> Findings:
        """Return the results so far."""
        results = self.results()
        costs = {method: routing_costs(self._config(method)) for method in self._shown(results)}
        timed = _are_one(self.record["machines"])
        return Findings(self.headline(), results, costs, self.baseline, self.margin, timed)

    def _shown(self, results: Sequence[Result]) -> list[str]:
        """Return the methods with results, and those chosen now."""
        return list(dict.fromkeys([*(result.method for result in results), *self.configs]))

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
            f"{short(cost['tokens'])} tokens; {machines}{_several(_versions(self.record['machines']))}"
        )

    def draw(self) -> list[str]:
        """Write the page and figures, and return the figures' names. Raises ValueError if matplotlib is missing."""
        findings = self.findings()
        return findings.draw(self.folder, {method: self.label(method) for method in findings.costs})

    def label(self, method: str) -> str:
        """Return the method's name in figures, which is its rule's label."""
        config = self._config(method)
        return DENSE if config.model.rule is None else config.model.rule.label_of(window(config).pool)


def _are_one(machines: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if all runs were timed on the same machine."""
    return len({(machine["cpu"], machine["gpu"], machine["threads"]) for machine in machines}) == 1


def _versions(machines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the versions of this package that made the runs."""
    return list(dict.fromkeys(str(machine["expert_threshold"]) for machine in machines))


def _several(versions: Sequence[str]) -> str:
    """Return a clause that names the versions, if they are several."""
    return f"; made by several versions of expert-threshold: {listed(versions)}" if len(versions) > 1 else ""


def routing_costs(config: RunConfig) -> dict[str, int | None]:
    """Return the bytes of the rules' state in all layers, and those that one rank of 8 sends for them in a step."""
    model, train = config.model, config.train
    if model.rule is None:
        return {"state_bytes": 0, "bytes_sent": 0}
    layers = model.layers - model.dense_layers
    state = sum(tensor.nbytes for tensor in model.rule.init())
    sent = bytes_sent(model.rule, (train.batch_size, model.context), train.accumulation)
    return {"state_bytes": layers * state, "bytes_sent": None if sent is None else layers * sent}


# Options in which joined comparisons must agree: these and the model's. Rules and what `sizes` names may differ.
SHARED = ("batch_size", "accumulation", "eval_tokens", "dtype")
OF_EXPERTS = ("d_expert", "shared_experts", "gate_norm", "expert_lr", "router_lr")
NOT_SHARED = ("rule", "dispatch", *OF_EXPERTS)  # the second is how a layer is computed


class JoinedRun(NamedTuple):
    """A finished run of the comparison in `folder`, with the method's name there.

    budget: what all joined runs must share. recipe: options of its optimizer, model and rule. options: these, those of
    training, and the comparison's versions.
    """

    folder: str
    result: Result
    budget: Mapping[str, Any]
    sizes: Mapping[str, str | None]
    recipe: Mapping[str, Any]
    options: Mapping[str, Any]
    costs: Mapping[str, Any]


def budget(train: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, of these sections of a run, in which the runs of a table must agree."""
    shared = {name: train[name] for name in SHARED}
    return shared | {name: value for name, value in model.items() if name not in NOT_SHARED}


def _runs_of(folder: str) -> tuple[list[JoinedRun], list[Any]]:
    """Return a comparison's finished runs and machines. Raises ValueError if it is none or has no such run."""
    path = Path(folder) / COMPARISON.file
    if not path.is_file():
        raise ValueError(f"--join {folder}: has no compare.json; name the folder of a comparison")
    record = read_json(path)
    require_format(record, COMPARISON, path, ELSEWHERE)
    with corrupted_file_error(path, ELSEWHERE):
        machines = record["machines"]
        _are_one(machines)
        versions = {"expert_threshold": listed(_versions(machines))}
        runs = []
        for result in map(result_from, record["runs"]):
            rule, its_costs = record["methods"][result.method], record["costs"][result.method]
            own = {name: its_costs[name] for name in ("bytes_sent", "state_bytes")}
            of_method = record["own_options"][result.method]
            train, model, optim = (
                {option: of_method.get(option, value) for option, value in record["options"][section].items()}
                for section in ("train", "model", "optim")
            )
            corpus = {"text": record["corpus"]["hash"], "tokenizer": record["corpus"]["tokenizer"]}
            shared = corpus | budget(train, model)
            recipe = {**optim, **model, **rule}
            if rule["name"] == DENSE:  # it has none of these, whatever the others of its comparison have
                recipe = {name: value for name, value in recipe.items() if name not in OF_EXPERTS}
            named = sizes({"model": {**model, "rule": rule}, "train": train, "optim": optim})
            whole = {**versions, **train, **recipe}
            runs.append(JoinedRun(folder, result, shared, named, recipe, whole, own))
    if not runs:
        raise ValueError(f"--join {folder}: has no finished run; continue that comparison, or leave it out")
    return runs, machines


def _require_same(
    run: JoinedRun, other: JoinedRun, name: str, mine: Mapping[str, Any], others: Mapping[str, Any]
) -> None:
    for option, value in mine.items():
        if value != others.get(option):
            raise ValueError(
                f"--join {run.folder}: {name} has {option}={value!r} there and {others.get(option)!r} in "
                f"{other.folder}; leave one of the folders out"
            )


def join(folders: Sequence[str], baseline: str | None, margin: float) -> Findings:
    """Return the runs of several comparisons as one. baseline: None is the usual one.

    A run that two folders have is taken from the first. Methods are named with what differs of `sizes`. Raises
    ValueError if a folder is no comparison or named twice, if budgets or texts differ, if runs of one name differ in
    their recipes, or one run that two have in any option.
    """
    if len({Path(folder).resolve() for folder in folders}) < len(folders):
        raise ValueError(f"--join: {listed(folders)} are not different folders; name each once")
    runs: list[JoinedRun] = []
    machines: list[Any] = []
    firsts: dict[str, tuple[Any, str]] = {}
    for folder in folders:
        found, here = _runs_of(folder)
        runs += found
        for run in found:
            for name, value in run.budget.items():
                of_first, first = firsts.setdefault(name, (value, folder))
                if value != of_first:
                    raise ValueError(f"--join {folder}: its {name}={value!r} differs from {of_first!r} of {first}")
        machines += here
    names, usual = names_with_sizes([(run.result.method, run.sizes) for run in runs])
    of_name: dict[str, JoinedRun] = {}
    kept: dict[tuple[str, int], JoinedRun] = {}
    made, repeated = Counter(run.folder for run in runs), Counter[str]()
    for run, name in zip(runs, names, strict=True):
        before = kept.setdefault((name, run.result.seed), run)
        repeated[run.folder] += before is not run
        _require_same(run, before, name, run.options, before.options)
        same = of_name.setdefault(name, run)
        _require_same(run, same, name, run.recipe, same.recipe)
    headlines = []
    for folder in folders:
        again = f", {repeated[folder]} of them in an earlier folder, too" if repeated[folder] else ""
        headlines.append(f"{folder} ({counted(made[folder], 'run')}{again})")
    costs_of = {name: run.costs for (name, _), run in kept.items()}
    return Findings(
        f"joined from {listed(headlines)}{_several(_versions(machines))}{usual and f'; {usual}'}",
        [run.result._replace(method=name) for (name, _), run in kept.items()],
        costs_of,
        chosen_baseline(baseline, list(costs_of)),
        margin,
        _are_one(machines),
    )


def _is_begun(path: Path) -> bool:
    return (path / "config.json").is_file()

"""Comparisons of methods that are trained with the same budget, data order and seeds, as runs in one folder.

Several comparisons can be joined into one table, in which the names of methods include the sizes that differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from ..analysis.records import Run
from ..analysis.results import names_with_sizes, sizes
from ..analysis.sentences import counted, listed, short
from ..config import RunConfig
from ..full_run import train_run
from ..plan import costs
from ..routing import DENSE
from ..runs import RunFolder
from ..train import DivergedError, Text
from ..train.device import machine, pick_device
from ..train.log import say
from .experiment import options_by_path, read_shared_text, require_same, run_title, with_dtype, with_shards
from .judgement import MARGIN, Findings, chosen_baseline, read_runs, text_of

COMPARISON, JOINED = "compare.json", "joined.json"
# Options of training in which compared runs must agree, and options of the model in which they may differ: those that
# `results.sizes` names, and `dispatch`, which only selects how a layer is computed.
SHARED = ("batch_size", "accumulation", "eval_tokens", "dtype")
NOT_SHARED = ("dispatch", "d_expert", "shared_experts", "gate_norm")
OF_EXPERTS = {
    *(f"model.{name}" for name in ("d_expert", "shared_experts", "gate_norm", "z_loss", "dense_layers")),
    *(f"optim.{name}" for name in ("router_lr", "expert_lr", "router_optimizer")),
}
"""Options that have no effect on a dense model."""


def budget(train: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options from these sections of a run that must be the same for all runs in a table."""
    shared = {name: train[name] for name in SHARED}
    return shared | {name: value for name, value in model.items() if name not in NOT_SHARED}


def several_versions(runs: Sequence[Run]) -> str:
    """Return a clause that lists the versions of this package that made the runs, or "" if there is only one."""
    versions = list(dict.fromkeys(str(run.config["versions"]["expert_threshold"]) for run in runs))
    return f"; made by several versions of expert-threshold: {listed(versions)}" if len(versions) > 1 else ""


class Comparison(NamedTuple):
    """Runs of several methods in folder/METHOD/seed_N. start: a description of what their options start from."""

    folder: Path
    configs: Mapping[str, RunConfig]  # by method, with seed 0
    seeds: int
    start: str
    baseline: str
    margin: float = MARGIN

    def runs(self) -> list[Run]:
        """Return all runs that were started, including runs of other methods and seeds."""
        return read_runs(self.folder)

    def require_continued(self) -> None:
        """Raise ValueError naming an option in which existing runs of the folder differ from the runs to come."""
        runs = self.runs()
        for run in runs:
            config = with_dtype(self.configs.get(run.method, next(iter(self.configs.values()))), _dtype(runs))
            now, before = options_by_path(config.to_dict()), options_by_path(run.config)
            if run.method not in self.configs:
                own = {f"model.{name}" for name in NOT_SHARED}
                now = {path: now[path] for path in now if path not in own and not path.startswith(("optim.", "rule."))}
            require_same(now | {"init_from": None}, before | {"init_from": run.config.get("init_from")}, self.folder)

    def train(self, console: Console) -> None:
        """Train or resume every unfinished run. All methods are trained with one seed before the next seed.

        If a run diverges, it has no loss, and training continues with the next run. All new runs share one text, which
        is read once. Raises KeyboardInterrupt if a signal stopped a run, and ValueError and OSError as `train` does.
        """
        text: Text | None = None
        earlier = self.runs()
        dtype, known = _dtype(earlier), text_of(earlier[0]) if earlier else None
        has_finished = {(run.method, run.seed): run.result is not None for run in earlier}
        plan = [(method, seed) for seed in range(self.seeds) for method in self.configs]
        seconds: list[float] = []
        for number, (method, seed) in enumerate(plan, start=1):
            if has_finished.get((method, seed)):
                continue
            start = time.monotonic()
            later = sum(not has_finished.get(run) for run in plan[number:])
            title = run_title(f"{number}/{len(plan)} {method} seed {seed}", start, seconds, later)
            config, resume = with_shards(with_dtype(self.configs[method], dtype), known), (method, seed) in has_finished
            if text is None and not resume:
                text = read_shared_text(config, known, self.folder, console)
                self.write()
            path = self.folder / method / f"seed_{seed}"
            path.mkdir(parents=True, exist_ok=True)
            try:
                own, new = replace(config, train=replace(config.train, seed=seed)), None if resume else text
                result = train_run(RunFolder(path), own, console, resume=resume, title=title, text=new)
            except DivergedError as error:
                say(console, f"{method} seed {seed} diverged: {error}; to train it again, remove {path}")
            else:
                if not result.finished:
                    raise KeyboardInterrupt
            seconds.append(time.monotonic() - start)
            self.write()

    def write(self) -> None:
        """Write the tables of all runs that have finished so far."""
        self.findings().write(self.folder, COMPARISON)

    def findings(self) -> Findings:
        """Return the results so far."""
        runs = [run for run in self.runs() if run.result is not None]
        return Findings(self.headline(runs), runs, self.baseline, self.margin)

    def headline(self, runs: Sequence[Run] = ()) -> str:
        """Return a line with the text, the budget and the machines of the runs, or this machine without runs."""
        config = next(iter(self.configs.values()))
        cost, corpus = costs(config), Path(config.data.source).name
        here = machine(pick_device(config.train.device), config.train.threads)
        machines = [run.config["machine"] | {"torch": run.config["versions"]["torch"]} for run in runs] or [here]
        made_on = dict.fromkeys(
            f"{m['gpu'] or m['cpu']}, threads: {m['threads']}" + (f", torch {m['torch']}" if "torch" in m else "")
            for m in machines
        )
        return (
            f"{self.start} on {corpus}: {cost['steps']:,} steps of {cost['tokens_per_step']:,} tokens = "
            f"{short(cost['tokens'])} tokens; {'; '.join(made_on)}{several_versions(runs)}"
        )


def _dtype(runs: Sequence[Run]) -> str | None:
    return runs[0].config["train"]["dtype"] if runs else None


def join(folders: Sequence[str], baseline: str | None, margin: float) -> Findings:
    """Return the finished runs of several comparisons as one. baseline: None selects the default baseline.

    Method names include the `sizes` that differ. A run that is in two folders is taken from the first. Raises
    ValueError if a folder has no finished run or is named twice, if budgets or texts differ, if runs of the same name
    differ in their recipes, or if runs of the same name and seed differ in their losses.
    """
    if len({Path(folder).resolve() for folder in folders}) < len(folders):
        raise ValueError(f"--join: {listed(folders)} include the same folder twice; pass each folder once")
    runs: list[Run] = []
    headlines = []
    for folder in folders:
        found = [run for run in read_runs(Path(folder)) if run.result is not None]
        if not found:
            raise ValueError(f"--join {folder} has no finished run in METHOD/seed_N; pass the folder of a comparison")
        headlines.append(f"{folder} ({counted(len(found), 'run')})")
        runs += found
    for run in runs:
        _require_same(run, runs[0], run.method, _budget)
    names, usual = names_with_sizes([(run.method, sizes(run.config)) for run in runs])
    of_name: dict[str, Run] = {}
    kept: dict[tuple[str, int], Run] = {}
    for run, name in zip(runs, names, strict=True):
        _require_same(run, of_name.setdefault(name, run), name, _recipe)
        _require_same(run, kept.setdefault((name, run.seed), run), f"{name} seed {run.seed}", _loss)
    return Findings(
        f"joined from {listed(headlines)}{several_versions(runs)}{usual and f'; {usual}'}",
        [replace(run, method=name) for (name, _), run in kept.items()],
        chosen_baseline(baseline, list(of_name)),
        margin,
    )


def _budget(run: Run) -> dict[str, Any]:
    text = text_of(run)
    corpus = {"text": text.corpus, "tokenizer": text.tokenizer}
    data = {name: value for name, value in run.config["data"].items() if name != "source"}
    return corpus | data | budget(run.config["train"], run.config["model"])


def _recipe(run: Run) -> dict[str, Any]:
    """Return those options of the optimizer, the model and the rule that have an effect."""
    left_out = {"model.dispatch", *(OF_EXPERTS if run.config["rule"]["name"] == DENSE else ())}
    every = options_by_path(run.config).items()
    return {path: value for path, value in every if not path.startswith(("train.", "data.")) and path not in left_out}


def _loss(run: Run) -> dict[str, Any]:
    assert run.result is not None
    return {"loss": run.result.loss}


def _require_same(run: Run, first: Run, name: str, facts: Callable[[Run], dict[str, Any]]) -> None:
    mine, others = facts(run), facts(first)
    for option, value in mine.items():
        if value != others.get(option):
            folder, other = (each.folder.path.parents[1] for each in (run, first))
            raise ValueError(
                f"--join {folder}: {name} has {option}={value!r} there and {others.get(option)!r} in {other}; leave "
                "one of the folders out"
            )

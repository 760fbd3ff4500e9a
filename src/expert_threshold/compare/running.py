"""Comparisons: methods trained with the same budget, data order and seeds. A comparison is a folder of runs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from ..analysis.sentences import listed, short
from ..config import RunConfig
from ..full_run import train_run
from ..plan import costs, window
from ..routing import DENSE
from ..runs import RunFolder
from ..train import DivergedError, Text
from ..train.device import machine, pick_device
from ..train.log import say
from .experiment import (
    Kind,
    options_by_path,
    read_shared_text,
    require_same,
    run_title,
    with_dtype,
    with_shards,
)
from .findings import ComparedRun, Findings, read_runs
from .judgement import MARGIN

COMPARISON = Kind("comparison", "compare.json")
# Options of training in which compared runs must agree, and options of the model in which they may differ: those that
# `results.sizes` names, and `dispatch`, which only selects how a layer is computed.
SHARED = ("batch_size", "accumulation", "eval_tokens", "dtype")
NOT_SHARED = ("dispatch", "d_expert", "shared_experts", "gate_norm")
OF_EXPERTS = {
    *(f"model.{name}" for name in ("d_expert", "shared_experts", "gate_norm", "z_loss", "dense_layers")),
    *(f"optim.{name}" for name in ("router_lr", "expert_lr", "router_optimizer")),
}
"""Options without effect on a dense model."""


def budget(train: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in these sections of a run in which all runs of a table must agree."""
    shared = {name: train[name] for name in SHARED}
    return shared | {name: value for name, value in model.items() if name not in NOT_SHARED}


def several_versions(runs: Sequence[ComparedRun]) -> str:
    """Return a clause that lists the versions of this package that made the runs, if there are several."""
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

    def runs(self) -> list[ComparedRun]:
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
        """Train every unfinished run, all methods of one seed before the next seed; a run already started is resumed.

        A run that diverges has no loss, and training continues with the next run. New runs share a text that is read
        once. Raises KeyboardInterrupt if a signal stopped a run, and ValueError and OSError as `train` does.
        """
        text: Text | None = None
        earlier = self.runs()
        dtype, known = _dtype(earlier), earlier[0].text if earlier else None
        started = {(run.method, run.seed): run for run in earlier}
        done = {key for key, run in started.items() if run.result is not None}
        plan = [(method, seed) for seed in range(self.seeds) for method in self.configs]
        seconds: list[float] = []
        for number, (method, seed) in enumerate(plan, start=1):
            if (method, seed) in done:
                continue
            start = time.monotonic()
            later = sum(run not in done for run in plan[number:])
            title = run_title(f"{number}/{len(plan)} {method} seed {seed}", start, seconds, later)
            config, resume = with_shards(with_dtype(self.configs[method], dtype), known), (method, seed) in started
            if text is None and not resume:
                text = read_shared_text(config, known, self.folder, console)
                self.write()
            path = self.folder / method / f"seed_{seed}"
            path.mkdir(parents=True, exist_ok=True)
            try:
                result = train_run(
                    RunFolder(path),
                    replace(config, train=replace(config.train, seed=seed)),
                    console,
                    resume=resume,
                    title=title,
                    text=None if resume else text,
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
        self.findings().write(self.folder, COMPARISON.file)

    def findings(self) -> Findings:
        """Return the results so far."""
        runs = [run for run in self.runs() if run.result is not None]
        return Findings(self.headline(runs), runs, self.baseline, self.margin)

    def headline(self, runs: Sequence[ComparedRun] = ()) -> str:
        """Return a line on the text, the budget and the machines that made the runs (this machine without runs)."""
        config = next(iter(self.configs.values()))
        cost, corpus = costs(config), Path(config.data.source).name
        here = machine(pick_device(config.train.device), config.train.threads)
        machines = [run.config["machine"] | {"torch": run.config["versions"]["torch"]} for run in runs] or [here]
        made_on = "; ".join(dict.fromkeys(_describe(machine) for machine in machines))
        return (
            f"{self.start} on {corpus}: {cost['steps']:,} steps of {cost['tokens_per_step']:,} tokens = "
            f"{short(cost['tokens'])} tokens; {made_on}{several_versions(runs)}"
        )

    def labels(self) -> dict[str, str]:
        """Return the names of the methods in figures: the labels of their rules."""
        configs = {run.method: RunConfig.from_dict(run.config) for run in self.runs()}
        return {
            method: DENSE if config.model.rule is None else config.model.rule.label_of(window(config).pool)
            for method, config in configs.items()
        }


def _dtype(runs: Sequence[ComparedRun]) -> str | None:
    return runs[0].config["train"]["dtype"] if runs else None


def _describe(machine: Mapping[str, Any]) -> str:
    made_with = f", torch {machine['torch']}" if "torch" in machine else ""
    return f"{machine['gpu'] or machine['cpu']}, threads: {machine['threads']}{made_with}"

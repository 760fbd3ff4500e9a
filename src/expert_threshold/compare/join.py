"""Joins several comparisons into one table, in which runs are named by what differs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..analysis.results import names_with_sizes, sizes
from ..analysis.sentences import counted, listed
from ..routing import DENSE
from .experiment import Kind, options_by_path
from .findings import ComparedRun, Findings, read_runs
from .judgement import chosen_baseline
from .running import OF_EXPERTS, budget, several_versions

JOINED = Kind("joined comparison", "joined.json")


def join(folders: Sequence[str], baseline: str | None, margin: float) -> Findings:
    """Return the finished runs of several comparisons as one. baseline: None selects the usual baseline.

    Names of methods include the `sizes` in which they differ. A run in two folders is taken from the first. Raises
    ValueError if a folder has no finished run or is named twice, if budgets or texts differ, if runs of the same name
    differ in their recipes, or if runs of the same name and seed differ in their losses.
    """
    if len({Path(folder).resolve() for folder in folders}) < len(folders):
        raise ValueError(f"--join: {listed(folders)} are not different folders; name each once")
    runs: list[ComparedRun] = []
    headlines = []
    for folder in folders:
        found = [run for run in read_runs(Path(folder)) if run.result is not None]
        if not found:
            raise ValueError(f"--join {folder}: has no finished run in METHOD/seed_N; name the folder of a comparison")
        headlines.append(f"{folder} ({counted(len(found), 'run')})")
        runs += found
    for run in runs:
        _require_same(run, runs[0], run.method, _budget)
    names, usual = names_with_sizes([(run.method, sizes(run.config)) for run in runs])
    of_name: dict[str, ComparedRun] = {}
    kept: dict[tuple[str, int], ComparedRun] = {}
    for run, name in zip(runs, names, strict=True):
        _require_same(run, of_name.setdefault(name, run), name, _recipe)
        _require_same(run, kept.setdefault((name, run.seed), run), f"{name} seed {run.seed}", _loss)
    return Findings(
        f"joined from {listed(headlines)}{several_versions(runs)}{usual and f'; {usual}'}",
        [run._replace(method=name) for (name, _), run in kept.items()],
        chosen_baseline(baseline, list(of_name)),
        margin,
    )


def _budget(run: ComparedRun) -> dict[str, Any]:
    corpus = {"text": run.text.corpus, "tokenizer": run.text.tokenizer}
    data = {name: value for name, value in run.config["data"].items() if name != "source"}
    return corpus | data | budget(run.config["train"], run.config["model"])


def _recipe(run: ComparedRun) -> dict[str, Any]:
    """Return the options of the optimizer, the model and the rule that have an effect."""
    left_out = {"model.dispatch", *(OF_EXPERTS if run.config["rule"]["name"] == DENSE else ())}
    every = options_by_path(run.config).items()
    return {path: value for path, value in every if not path.startswith(("train.", "data.")) and path not in left_out}


def _loss(run: ComparedRun) -> dict[str, Any]:
    assert run.result is not None
    return {"loss": run.result.loss}


def _require_same(run: ComparedRun, first: ComparedRun, name: str, facts: Any) -> None:
    mine, others = facts(run), facts(first)
    for option, value in mine.items():
        if value != others.get(option):
            raise ValueError(
                f"--join {run.folder}: {name} has {option}={value!r} there and {others.get(option)!r} in "
                f"{first.folder}; leave one of the folders out"
            )

"""The evaluation.json of a run folder, which keeps the results of a trained model so that nothing is measured twice."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..files import read_json, replace_json
from ..model import GPT
from .bundle import Baselines, Task
from .core import Scorer, TaskResult, centred, evaluate_task

RESULTS = "evaluation.json"
FORMAT, VERSION = "expert-threshold evaluation", 1

Progress = Callable[[str], Callable[[int, int], None]]
"""Takes the name of a measurement; returns a callback that takes how much is done and the total."""


def read_results(run: Path, step: int | None) -> dict[str, Any]:
    """Return the sections of a run's evaluation.json, empty if there is none or it is of another step."""
    path = run / RESULTS
    saved = read_json(path) if path.exists() else {}
    return saved if saved.get("step") == step else {}


class Results:
    """The results of one model, in sections; results of another model in the same file are ignored.

    rate: that of `GPT.set_rate`; each rate has its own file.
    """

    def __init__(self, folder: Path, model: GPT, step: int, rate: float | None = None) -> None:
        self.path = folder / (RESULTS if rate is None else f"evaluation_rate_{rate:g}.json")
        self.rate = rate
        self._header = {
            "format": FORMAT,
            "version": VERSION,
            "expert_threshold": __version__,
            "step": step,
            "weights": _hash(model),
            "dtype": str(model.compute_dtype).removeprefix("torch."),
        } | ({} if rate is None else {"rate": rate})

    def read(self) -> dict[str, Any]:
        saved = read_json(self.path) if self.path.exists() else {}
        return saved if all(saved.get(key) == value for key, value in self._header.items()) else dict(self._header)

    def write(self, section: str, value: Mapping[str, Any]) -> None:
        replace_json(self.path, self.read() | {section: value})


def _hash(model: GPT) -> str:
    """Return the sha256, in hex, of all weights in their compute dtype and of all buffers."""
    digest = hashlib.sha256()
    weights = {name: weight.detach().to(model.compute_dtype) for name, weight in model.named_parameters()}
    for name, tensor in sorted((weights | dict(model.named_buffers())).items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def ask_core(
    results: Results,
    tasks: Sequence[Task],
    scorer: Scorer,
    progress: Progress,
    *,
    max_per_task: int | None = None,
    baselines: Baselines = "nanochat",
    whole: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Return the section "core", saved after every task that was not evaluated before.

    whole: True if these are all tasks of the bundle, so that their mean is CORE. say: called with a line about each
    evaluated task. Raises ValueError as `evaluate_task` does.
    """
    saved = results.read().get("core")
    known = _asked(saved, max_per_task=max_per_task)
    kept = _asked(saved, max_per_task=max_per_task, baselines=baselines)  # drop results centred with other baselines
    core: dict[str, Any] = {}
    asked = {}
    for task in tasks:
        found = known.get(task.label)
        if found is None or found["hash"] != task.hash:
            found = asdict(evaluate_task(task, scorer, max_rows=max_per_task, progress=progress(task.label)))
            say(f"{task.label}: {found['accuracy']:.4f} of {found['rows']:,} questions right")
        asked[task.label] = found | {
            "hash": task.hash,
            "kind": task.kind,
            "shots": task.shots,
            "baseline": task.baseline,
            "centred": centred(found["accuracy"], task.baseline),
        }
        complete = whole and len(asked) == len(tasks)
        metric = sum(each["centred"] for each in asked.values()) / len(asked) if complete else None
        core = {"max_per_task": max_per_task, "baselines": baselines, "metric": metric, "tasks": {**kept, **asked}}
        results.write("core", core)
    return core


def _asked(core: Any, **options: Any) -> dict[str, dict[str, Any]]:
    """Return the saved results of tasks that were asked with these options; damaged ones count as not asked."""
    same = isinstance(core, dict) and all(core.get(name, ...) == value for name, value in options.items())
    tasks = core.get("tasks") if same else None
    return {label: task for label, task in tasks.items() if _is_whole(task)} if isinstance(tasks, dict) else {}


def _is_whole(task: Any) -> bool:
    names = {"hash", *(field.name for field in fields(TaskResult))}
    return isinstance(task, dict) and names <= task.keys() and type(task["accuracy"]) is float

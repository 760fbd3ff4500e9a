"""The evaluation.json of a run folder, which keeps the results of a trained model so that nothing is measured twice."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..data import Tokenizer
from ..files import read_json, replace_json
from ..model import GPT
from .bundle import Baselines, Task
from .core import Scorer, TaskResult, centred, evaluate_task

RESULTS = "evaluation.json"
FORMAT, VERSION = "expert-threshold evaluation", 1
KEYS = ("bundle", "max_per_task", "baselines", "metric")
"""A CORE score: what identifies it, and its value."""

Progress = Callable[[str], Callable[[int, int], None]]
"""Returns, for the name of a measurement, a callback for how much is done and the total."""


def read_results(run: Path, step: int | None) -> dict[str, Any]:
    """Return the sections of a run's evaluation.json that were written last for this step, empty if there are none."""
    return next((saved for saved in _read(run / RESULTS) if saved.get("step") == step), {})


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the results in a file, one for each step and dtype, those written last first."""
    saved = read_json(path) if path.exists() else {}
    others = saved.pop("others", [])
    return [saved, *(each for each in others if isinstance(each, dict))] if isinstance(others, list) else [saved]


class Results:
    """The results of one model, in sections. Those of other steps and dtypes stay in the file, in "others".

    rate: that of `GPT.set_rate`; each rate has its own file.
    """

    def __init__(self, folder: Path, model: GPT, tokenizer: Tokenizer, step: int, rate: float | None = None) -> None:
        self.path = folder / (RESULTS if rate is None else f"evaluation_rate_{rate:g}.json")
        self.rate = rate
        self._header = {
            "format": FORMAT,
            "version": VERSION,
            "expert_threshold": __version__,
            "step": step,
            "weights": _hash(model),
            "tokenizer": tokenizer.hash,
            "dtype": str(model.compute_dtype).removeprefix("torch."),
        } | ({} if rate is None else {"rate": rate})

    def read(self) -> dict[str, Any]:
        for saved in _read(self.path):
            if self._is_same(saved, self._header):
                return saved
        return dict(self._header)

    def write(self, section: str, value: Mapping[str, Any]) -> None:
        others = [
            saved for saved in _read(self.path) if "step" in saved and not self._is_same(saved, ("step", "dtype"))
        ]
        replace_json(self.path, self.read() | {section: value} | ({"others": others} if others else {}))

    def _is_same(self, saved: Mapping[str, Any], names: Iterable[str]) -> bool:
        return all(saved.get(name) == self._header[name] for name in names)


def _hash(model: GPT) -> str:
    """Return the sha256, in hex, of the model's options, all weights in their compute dtype, and all buffers."""
    digest = hashlib.sha256(repr(model.config).encode())
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
    labels: Collection[str] | None = None,
    max_per_task: int | None = None,
    baselines: Baselines = "nanochat",
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Return the results with this max_per_task, saved after every task that was not evaluated before.

    tasks: all of the bundle, whose mean is CORE. labels: of those to evaluate; None evaluates all. say: called with a
    line about each evaluated task. Raises ValueError as `evaluate_task` does.
    """
    for task in tasks:
        if (labels is None or task.label in labels) and _find(_cores(results), task, max_per_task) is None:
            found = asdict(evaluate_task(task, scorer, max_rows=max_per_task, progress=progress(task.label)))
            say(f"{task.label}: {found['accuracy']:.4f} of {found['rows']:,} questions right")
            _save(results, tasks, {task.label: found}, max_per_task, baselines)
    return _save(results, tasks, {}, max_per_task, baselines)


def _save(
    results: Results,
    tasks: Sequence[Task],
    new: Mapping[str, dict[str, Any]],
    max_per_task: int | None,
    baselines: Baselines,
) -> dict[str, Any]:
    """Save new results of tasks beside the known ones, and return those of this bundle and max_per_task, centred alike.

    Each bundle and max_per_task has a CORE of its own. The section "core" holds the one of all tasks and of the most
    questions, if there is any; "others" holds the rest.
    """
    cores = _cores(results)
    key = {"bundle": _bundle(tasks), "max_per_task": max_per_task}
    known: dict[str, dict[str, Any]] = {}
    for task in tasks:
        found = new.get(task.label) or _find(cores, task, max_per_task)
        if found is not None:
            known[task.label] = found | {
                "hash": task.hash,
                "kind": task.kind,
                "shots": task.shots,
                "delimiter": task.delimiter,
                "baseline": task.baseline,
                "centred": centred(found["accuracy"], task.baseline),
            }
    metric = sum(each["centred"] for each in known.values()) / len(tasks) if len(known) == len(tasks) else None
    core = {**key, "baselines": baselines, "metric": metric, "tasks": known}
    rest = [each for each in cores if any(each[name] != value for name, value in key.items())]
    first, *others = sorted([core, *rest], key=_extent, reverse=True)
    results.write("core", first | ({"others": others} if others else {}))
    return core


def _bundle(tasks: Sequence[Task]) -> str:
    """Return the sha256, in hex, of the tasks' questions and prompt formats."""
    asked = [(task.label, task.hash, task.kind, task.shots, task.delimiter) for task in tasks]
    return hashlib.sha256(repr(asked).encode()).hexdigest()


def _extent(core: Mapping[str, Any]) -> tuple[bool, int]:
    """Return whether all tasks of the bundle were evaluated, and the number of questions."""
    return core["metric"] is not None, sum(task["rows"] for task in core["tasks"].values())


def _find(cores: Sequence[Mapping[str, Any]], task: Task, max_per_task: int | None) -> dict[str, Any] | None:
    """Return a saved result for the same questions and prompt format, whatever its max_per_task, or None."""
    asked = (task.hash, len(task.rows[:max_per_task]), task.kind, task.shots, task.delimiter)
    for core in cores:
        found: dict[str, Any] = core["tasks"].get(task.label, {})
        if tuple(map(found.get, ("hash", "rows", "kind", "shots", "delimiter"))) == asked:
            return found
    return None


def _cores(results: Results) -> list[dict[str, Any]]:
    """Return the saved results of CORE, one for each bundle and max_per_task, without damaged ones."""
    saved = results.read().get("core")
    others = saved.get("others", []) if isinstance(saved, dict) else []
    cores = [saved, *(others if isinstance(others, list) else [])]
    return [
        {name: core[name] for name in KEYS}
        | {"tasks": {label: task for label, task in core["tasks"].items() if _is_whole(task)}}
        for core in cores
        if isinstance(core, dict) and set(KEYS) <= core.keys() and isinstance(core.get("tasks"), dict)
    ]


def _is_whole(task: Any) -> bool:
    names = {"hash", *(field.name for field in fields(TaskResult))}
    if not (isinstance(task, dict) and names <= task.keys()):
        return False
    return type(task["accuracy"]) is float and type(task["rows"]) is int

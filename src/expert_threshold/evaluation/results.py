"""Reads and writes a run folder's evaluation.json, which stores results so that nothing is measured twice."""

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

Progress = Callable[[str], Callable[[int, int], None]]
"""Maps the name of a measurement to a function that is called with the amount done and the total."""


def read_results(run: Path, step: int | None) -> dict[str, Any]:
    """Return the most recent results for a step from a run's evaluation.json, or an empty dict if there are none."""
    return next((saved for saved in _read(run / RESULTS) if saved.get("step") == step), {})


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the results in a file, one for each step and dtype, most recent first."""
    saved = read_json(path) if path.exists() else {}
    others = saved.pop("others", [])
    return [saved, *(each for each in others if isinstance(each, dict))] if isinstance(others, list) else [saved]


class Results:
    """The results of one model, in sections. The section "others" keeps results for other steps and dtypes.

    rate: as in `GPT.set_rate`; each rate has a separate file.
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

    def write(self, section: str, value: Any) -> None:
        saved = [each for each in _read(self.path) if "step" in each]
        others = [each for each in saved if not self._is_same(each, ("step", "dtype"))]
        replace_json(self.path, self.read() | {section: value} | ({"others": others} if others else {}))

    def _is_same(self, saved: Mapping[str, Any], names: Iterable[str]) -> bool:
        return all(saved.get(name) == self._header[name] for name in names)


def _hash(model: GPT) -> str:
    """Return a sha256, in hex, of the model's options, weights (in the compute dtype) and buffers."""
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
    """Evaluate CORE with at most max_per_task questions per task. Results are saved after each task and reused later.

    The section "answers" keeps all results, the section "core" only the most complete ones: those with CORE itself
    rather than some tasks, then those with the most questions.

    tasks: all tasks of the bundle, whose mean is CORE. labels: the tasks to evaluate; None evaluates all. say: called
    with a line about each evaluated task. Raises ValueError as `evaluate_task` does.
    """

    def answers() -> list[Any]:
        saved = results.read().get("answers")
        return [each for each in saved if _is_whole(each)] if isinstance(saved, list) else []

    for task in tasks:
        if (labels is None or task.label in labels) and _find(answers(), task, max_per_task) is None:
            found = asdict(evaluate_task(task, scorer, max_rows=max_per_task, progress=progress(task.label)))
            say(f"{task.label}: {found['accuracy']:.4f} of {found['rows']:,} questions right")
            results.write("answers", [*answers(), _asked(task) | found])  # another process may have added some
    known, kept = {}, answers()
    for task in tasks:
        if (answer := _find(kept, task, max_per_task)) is not None:
            score = {"baseline": task.baseline, "centred": centred(answer["accuracy"], task.baseline)}
            known[task.label] = answer | score
    core = {
        "bundle": hashlib.sha256(repr([(task.label, _asked(task)) for task in tasks]).encode()).hexdigest(),
        "max_per_task": max_per_task,
        "baselines": baselines,
        "metric": sum(each["centred"] for each in known.values()) / len(tasks) if len(known) == len(tasks) else None,
        "tasks": known,
    }
    if _extent(core) >= _extent(results.read().get("core")):
        results.write("core", core)
    return core


def _asked(task: Task) -> dict[str, Any]:
    """Return what identifies a task's questions and prompt format."""
    return {"hash": task.hash, "kind": task.kind, "shots": task.shots, "delimiter": task.delimiter}


def _extent(core: Any) -> tuple[bool, int]:
    """Return whether all tasks were evaluated and the number of questions, or (False, -1) if `core` is damaged."""
    try:
        return core["metric"] is not None, sum(task["rows"] for task in core["tasks"].values())
    except (AttributeError, LookupError, TypeError):
        return False, -1


def _find(answers: Sequence[dict[str, Any]], task: Task, max_per_task: int | None) -> dict[str, Any] | None:
    """Return a saved result for the same questions and prompt format, or None if there is none."""
    asked = _asked(task) | {"rows": len(task.rows[:max_per_task])}
    return next((answer for answer in answers if asked.items() <= answer.items()), None)


def _is_whole(answer: Any) -> bool:
    names = {"hash", *(field.name for field in fields(TaskResult))}
    whole = isinstance(answer, dict) and names <= answer.keys()
    return whole and type(answer["accuracy"]) is float and type(answer["rows"]) is int

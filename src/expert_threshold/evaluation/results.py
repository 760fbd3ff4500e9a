"""The evaluation.json of a run folder: what is known of a trained model, so that nothing is measured twice."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..model import GPT
from ..runs.files import read_json, replace_file, to_json
from .bundle import Baselines, Task
from .core import Scorer, centred, evaluate_task

FORMAT, VERSION = "expert-threshold evaluation", 1

Progress = Callable[[str], Callable[[int, int], None]]
"""Told what is measured, returns what wants to be told how much of it is done, and of how much."""


class Results:
    """What was measured of one model, in sections; what the file has of another one counts for nothing.

    rate: that of `GPT.set_rate`; what is measured at one has a file of its own.
    """

    def __init__(self, folder: Path, model: GPT, step: int, rate: float | None = None) -> None:
        self.path = folder / ("evaluation.json" if rate is None else f"evaluation_rate_{rate:g}.json")
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
        text = to_json(self.read() | {section: value}, indent=2) + "\n"
        replace_file(self.path, text.encode())


def _hash(model: GPT) -> str:
    """sha256, in hex, of all weights as they are multiplied and of all buffers."""
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
    """The section "core", written after every task that was not asked before.

    whole: these are all tasks of the bundle, and their mean is CORE. say: is told a line about each that is asked.
    Raises ValueError as `evaluate_task` does.
    """
    saved = results.read().get("core", {})
    known = saved.get("tasks", {}) if saved.get("max_per_task", ...) == max_per_task else {}
    kept = known if saved.get("baselines") == baselines else {}  # what was centred otherwise goes
    core: dict[str, Any] = {}
    asked = {}
    for task in tasks:
        found = known.get(task.label, {})
        if found.get("hash") != task.hash:
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

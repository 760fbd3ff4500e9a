"""`et evaluate`: how good trained models are, side by side."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..config import RunConfig
from ..data import Tokenizer, open_source, pack
from ..data.public import core_bundle
from ..evaluation import Baselines, ModelScorer, Task, centred, evaluate, evaluate_task, read_bundle
from ..evaluation.core import choose_rows
from ..model import GPT
from ..routing import ExpertChoice
from ..runs import RunFolder, load_model
from ..runs.files import damage_told, read_json, replace_file, to_json
from ..train.config import DeviceName, DtypeName
from ..train.device import keep_freed_memory, pick_device, pick_dtype
from ..train.log import clock
from .options import Command, Option, parse

OPTIONS = [
    Option("run", str, None, "The folders of the runs to evaluate.", positional=True, required=True, many=True),
    Option(
        "bundle", str | None, "CACHE/core", "The eval bundle with the tasks of CORE, if it is there; none asks none."
    ),
    Option("tasks", str, "all", "The tasks of the bundle to ask, as A,B."),
    Option("max_per_task", int | None, None, "Ask so many questions of each task at most; none is all."),
    Option("baselines", Baselines, "nanochat", "What counts as chance: the bundle's own table, or DCLM's newer one."),
    Option("validation", bool, True, "Measure the loss on the text that the run was validated on."),
    Option("eval_tokens", int | None, None, "Validate on so many tokens at most; none is all."),
    Option("json", bool, False, "Print JSON instead of a table."),
    Option("step", int | None, None, "The checkpoint to use; none is the last."),
    Option("device", DeviceName, "auto", "Where to compute; auto is cuda where there is one, else cpu."),
    Option("dtype", DtypeName, "auto", "Type of the matrix products; auto is bfloat16 where the hardware has it."),
]
DESCRIPTION = (
    "Evaluate trained models: loss and bits per byte on their validation text, and the tasks of CORE once et data core "
    "has downloaded them, or --bundle names them.\n\n"
    "Results go to evaluation.json in the run's folder, after each task; what is there already is not done again."
)
FORMAT, VERSION = "expert-threshold evaluation", 1
INTERVALS = {True: 0.2, False: 10.0}  # seconds between two lines of progress, on a terminal and elsewhere


def run(arguments: Sequence[str]) -> None:
    """Evaluate each run, write its evaluation.json, and print all of them."""
    options = {option.name: option.default for option in OPTIONS} | {"bundle": core_bundle()}
    options |= parse(Command("et evaluate", DESCRIPTION, {"evaluate": OPTIONS}), arguments)
    if not options["validation"] and options["bundle"] is None:
        raise ValueError("--no-validation leaves nothing to do; name a --bundle, or leave it out")
    for name in ("max_per_task", "eval_tokens"):
        if options[name] is not None and options[name] < 1:
            raise ValueError(f"--{name.replace('_', '-')} {options[name]}: must be at least 1; none is all")
    tasks = _tasks(options)
    device = pick_device(options["device"])
    dtype = pick_dtype(options["dtype"], device)
    # All are looked at before the first is evaluated.
    steps = [RunFolder.open(path).load_checkpoint(options["step"], parts=()).step for path in options["run"]]
    keep_freed_memory()
    results = {}
    for path, step in zip(options["run"], steps, strict=True):
        model, tokenizer = load_model(path, step, device, dtype)
        header = {
            "format": FORMAT,
            "version": VERSION,
            "expert_threshold": __version__,
            "step": step,
            "weights": _hash(model),
            "dtype": str(dtype).removeprefix("torch."),
        }
        evaluated = Run(RunFolder.open(path), model, tokenizer, header, Progress(Console(stderr=True), path))
        if options["validation"]:
            evaluated.validate(options["eval_tokens"])
        if tasks:
            evaluated.ask(tasks, options["max_per_task"], options["baselines"], whole=options["tasks"] == "all")
        results[path] = evaluated.read()
    if options["json"]:
        print(json.dumps([{"run": path} | result for path, result in results.items()]))
    else:
        Console().print(_table(results, [task.label for task in tasks], options["validation"]))


def _tasks(options: Mapping[str, Any]) -> list[Task]:
    if options["bundle"] is not None:
        labels = None if options["tasks"] == "all" else options["tasks"].split(",")
        tasks = read_bundle(options["bundle"], labels, options["baselines"])
        for task in tasks:
            choose_rows(task, options["max_per_task"])  # refuses too few now, and not after an hour
        return tasks
    for name in ("tasks", "max_per_task", "baselines"):
        if options[name] != next(option.default for option in OPTIONS if option.name == name):
            raise ValueError(f"--{name.replace('_', '-')} {options[name]}: of no use without --bundle; name one")
    return []


def _hash(model: GPT) -> str:
    """sha256 of all weights and buffers, in hex."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


class Progress(NamedTuple):
    """Lines about a run on stderr."""

    console: Console
    run: str

    def say(self, text: str, end: str = "\n") -> None:
        """A line that stays, unless it ends otherwise."""
        line = f"{self.run}: {text}"
        if self.console.is_terminal:  # it covers what was there
            line = line[: self.console.width - 1].ljust(self.console.width - 1)
        self.console.print(line, end=end, markup=False, highlight=False, soft_wrap=True)

    def task(self, what: str) -> Callable[[int, int], None]:
        """A function that wants to be told how much is done, and of how much."""
        live = self.console.is_terminal
        start = shown = time.monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal shown
            now = time.monotonic()
            if now - shown >= INTERVALS[live]:
                shown = now
                left = clock((now - start) * (total - done) / done)
                self.say(f"{what} {done / total:.0%}, {left} left", end="\r" if live else "\n")

        return progress


class Run(NamedTuple):
    """A trained model, and the evaluation.json of its run."""

    folder: RunFolder
    model: GPT
    tokenizer: Tokenizer
    header: dict[str, Any]  # what has to be equal for earlier results to be of this model
    progress: Progress

    @property
    def path(self) -> Path:
        return self.folder.path / "evaluation.json"

    def read(self) -> dict[str, Any]:
        """What is known of this model so far. Raises ValueError where it is damaged so that it cannot be shown."""
        saved = read_json(self.path) if self.path.exists() else {}
        if any(saved.get(key) != value for key, value in self.header.items()):
            return dict(self.header)
        with damage_told(self.path, "remove it to evaluate this run anew"):
            known = {str(self.folder.path): saved}
            _table(known, list(saved["core"]["tasks"]) if "core" in saved else [], "validation" in saved)
        return saved

    def write(self, section: str, value: Mapping[str, Any]) -> None:
        text = to_json(self.read() | {section: value}, indent=2) + "\n"
        replace_file(self.path, text.encode())

    def validate(self, eval_tokens: int | None) -> None:
        """Loss and bits per byte, causal, and for expert choice by training's pools as well.

        Raises ValueError if the text is gone or has changed.
        """
        config = RunConfig.from_dict(self.folder.config)
        key = {"corpus": self.folder.section("corpus").get("hash"), "eval_tokens": eval_tokens}
        saved = self.read().get("validation", {})
        if all(saved.get(name, ...) == value for name, value in key.items()):
            return
        corpus = open_source(**asdict(config.data))
        if corpus.hash != key["corpus"]:
            raise ValueError(
                f"{corpus.name} has changed since {self.folder.path} began; restore the text, or use --no-validation"
            )
        # Whole windows are evaluated, or whole batches of them, and the last target needs one token more.
        window = self.model.config.context * config.train.batch_size
        enough = None if eval_tokens is None else eval_tokens + window
        tokens = pack(corpus, self.tokenizer, "validation", max_tokens=enough)
        progress = self.progress.task("validation")
        causal = evaluate(self.model, tokens, self.tokenizer, max_tokens=eval_tokens, progress=progress)
        result = key | {
            "tokens": causal.tokens,
            "bytes": causal.bytes,
            "loss": _finite(causal.loss),
            "bits_per_byte": _finite(causal.bits_per_byte),
        }
        if isinstance(self.model.config.rule, ExpertChoice):
            batch_size = config.train.batch_size
            progress = self.progress.task("validation by training pools")
            pooled = evaluate(
                self.model,
                tokens,
                self.tokenizer,
                batch_size=batch_size,
                max_tokens=eval_tokens,
                training_pools=True,
                progress=progress,
            )
            result["training_pools"] = {
                "batch_size": batch_size,
                "tokens": pooled.tokens,
                "loss": _finite(pooled.loss),
                "bits_per_byte": _finite(pooled.bits_per_byte),
            }
        self.progress.say(f"validation loss {causal.loss:.4f}, {causal.bits_per_byte:.4f} bits per byte")
        self.write("validation", result)

    def ask(self, tasks: Sequence[Task], max_per_task: int | None, baselines: Baselines, whole: bool) -> None:
        """Every task that is not asked yet. whole: these are all of the bundle, and their mean is CORE."""
        saved = self.read().get("core", {})
        known = saved.get("tasks", {}) if saved.get("max_per_task", ...) == max_per_task else {}
        kept = known if saved.get("baselines") == baselines else {}  # what was centred otherwise goes
        scorer = ModelScorer(self.model, self.tokenizer)
        results = {}
        for task in tasks:
            result = known.get(task.label, {})
            if result.get("hash") != task.hash:
                start = time.monotonic()
                progress = self.progress.task(task.label)
                result = asdict(evaluate_task(task, scorer, max_rows=max_per_task, progress=progress))
                self.progress.say(f"{task.label} {result['accuracy']:.4f} right, {clock(time.monotonic() - start)}")
            results[task.label] = result | {
                "hash": task.hash,
                "kind": task.kind,
                "shots": task.shots,
                "baseline": task.baseline,
                "centred": centred(result["accuracy"], task.baseline),
            }
            complete = whole and len(results) == len(tasks)
            metric = sum(result["centred"] for result in results.values()) / len(results) if complete else None
            core = {"max_per_task": max_per_task, "baselines": baselines, "metric": metric}
            self.write("core", core | {"tasks": {**kept, **results}})


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def _table(results: Mapping[str, Mapping[str, Any]], labels: Sequence[str], validation: bool) -> Table:
    """A column for each run, a row for each number; of a task the accuracy and, after it, what centring makes of it."""
    table = Table("")
    for path in results:
        table.add_column(Text(path, overflow="fold"), justify="right")

    def add(name: str, show: Callable[[Mapping[str, Any]], str]) -> None:
        table.add_row(name, *(show(result) for result in results.values()))

    if validation:
        add("tokens validated on", lambda result: f"{result['validation']['tokens']:,}")
        add("validation loss", lambda result: _show(result["validation"]["loss"]))
        add("bits per byte", lambda result: _show(result["validation"]["bits_per_byte"]))
        if any("training_pools" in result["validation"] for result in results.values()):
            pooled = [result["validation"].get("training_pools", {}) for result in results.values()]
            table.add_row("loss by training pools", *(_show(each.get("loss")) for each in pooled))
            table.add_row("bits per byte by them", *(_show(each.get("bits_per_byte")) for each in pooled))
    for label in labels:
        add(label, lambda result, label=label: _show_task(result["core"]["tasks"][label]))  # type: ignore[misc]
    if labels:
        add("CORE", lambda result: _show(result["core"]["metric"]))
        add("prompts cropped", lambda result: _show_cropped([result["core"]["tasks"][label] for label in labels]))
    return table


def _show(number: float | None) -> str:
    return "–" if number is None else f"{number:.4f}"


def _show_task(result: Mapping[str, Any]) -> str:
    return f"{result['accuracy']:.4f} {result['centred']:+.4f}"


def _show_cropped(results: Sequence[Mapping[str, Any]]) -> str:
    cropped, sequences = (sum(result[name] for result in results) for name in ("cropped", "sequences"))
    return f"{cropped:,} of {sequences:,}"

"""`et evaluate`: evaluates trained models and shows them side by side."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..analysis.figures.style import style
from ..analysis.page import save_figure
from ..analysis.sentences import fixed
from ..data import Corpus, DataConfig, Tokenizer, open_held_out, open_source, pack
from ..data.public import core_bundle
from ..data.sources import CODE, absolute
from ..evaluation import Baselines, ModelScorer, Results, Task, ask_core, evaluate, measure_rates, read_bundle
from ..evaluation.core import choose_rows
from ..evaluation.results import RESULTS
from ..files import corrupted_file_error, replace_json
from ..install import install
from ..model import GPT
from ..option import Count
from ..runs import RunFolder, load_model
from ..train.device import keep_freed_memory
from ..train.log import Display
from . import rates
from .options import COMPUTE, RATE, STEP, Option, flag_of, parse, parse_names, picked_device

if TYPE_CHECKING:
    from ..integrations.lm_eval import Harness

DATA = (
    "Additional text to measure the loss on: any text that et train accepts, the code of the embedded corpus, GSM8K or "
    "HumanEval. May be repeated."
)
OPTIONS = [
    Option("run", str, None, "The folders of the runs to evaluate.", positional=True, required=True, many=True),
    Option("validation", bool, True, "Measure the loss on the run's own validation text."),
    Option("data", str, None, DATA, many=True),
    Option("text_field", str, "text", "Name of the field (.jsonl) or column (.parquet) of --data with the text."),
    Option("eval_tokens", Count | None, None, "Maximum number of tokens of each text to measure on. Defaults to all."),
    Option("bundle", str | None, "CACHE/core", "Folder with the tasks of CORE, if it exists. Use none to skip CORE."),
    Option("tasks", str, "all", "Comma-separated tasks of the bundle to evaluate."),
    Option("baselines", Baselines, "nanochat", "Table of chance accuracies: the bundle's own, or DCLM's newer one."),
    Option("harness", str | None, None, "Comma-separated tasks of lm-evaluation-harness to evaluate."),
    Option("harness_path", str | None, None, "A folder with additional tasks for the harness."),
    Option("max_per_task", Count | None, None, "Maximum number of questions per task. Defaults to all."),
    RATE,
    Option("rates", str | None, None, "Measure only the loss, at each of these rates, such as 0.25,0.5,1,2."),
    Option("json", bool, False, "Print JSON instead of a table."),
    STEP,
    *COMPUTE,
]
DEFAULTS = {option.name: option.default for option in OPTIONS}
DESCRIPTION = (
    "Evaluate trained models by their loss and bits per byte on validation text and other texts, by the tasks of CORE "
    "(from et data core or --bundle), and by tasks of lm-evaluation-harness.\n\nResults are saved to evaluation.json "
    "in the run's folder after each task and are not measured again, except for tasks of lm-evaluation-harness."
)
Result = Mapping[str, Any]
VALIDATION = "validation"
"""Names a run's own validation text in the table."""
NO_VALIDATION = "use --no-validation, with --data"
HINT = "CORE was not evaluated: download its questions with et data core, or pass their folder with --bundle"


def run(arguments: Sequence[str]) -> None:
    """Evaluate each run, write its evaluation.json, and print the table."""
    given = parse("et evaluate", DESCRIPTION, OPTIONS, arguments)
    defaults = DEFAULTS | {"bundle": core_bundle()}
    options = defaults | given
    _check(options, defaults)
    # Check everything before the first run is evaluated.
    if options["rates"] is not None:
        _dial(options)
        return
    for path in options["run"] if options["rate"] is not None else ():
        rates.require_cutoffs(RunFolder.open(path), "at_rate", f"--rate {options['rate']:g}: ")
    tasks, labels = _tasks(options)
    harness = _harness(options)
    corpora = {source: open_held_out(source, options["text_field"]) for source in options["data"] or ()}
    results = {}
    for path, (folder, step, model, tokenizer) in _models(options):
        known = Results(folder.path, model, tokenizer, step, options["rate"])
        with Display(Console(stderr=True), name=path) as display:
            evaluated = Run(folder, model, tokenizer, known, display)
            if options["validation"]:
                evaluated.validate(options["eval_tokens"])
            for source, corpus in corpora.items():
                evaluated.measure_on(source, corpus, options["eval_tokens"])
            asked: dict[str, Any] = {}  # replaces saved sections, which may hold further results
            if tasks:
                how = {"labels": labels, "max_per_task": options["max_per_task"], "baselines": options["baselines"]}
                scorer = ModelScorer(model, tokenizer)
                asked["core"] = ask_core(known, tasks, scorer, display.task, say=display.say, **how)
            if harness is not None:
                asked["harness"] = evaluated.ask_harness(harness, options["max_per_task"])
        results[path] = known.read() | asked
    if options["json"]:
        print(json.dumps([{"run": path} | result for path, result in results.items()]))
    else:
        places = _short_names([*dict.fromkeys(map(_place, corpora))])
        with corrupted_file_error(RESULTS, "remove that file from the run to measure again"):
            shown = table(results, options["validation"], places, labels, harness is not None)
        Console().print(shown)
    if options["bundle"] is None and not given.keys() & {"bundle", "data", "harness"}:
        print(HINT, file=sys.stderr)


def _models(options: Mapping[str, Any]) -> Iterator[tuple[str, tuple[RunFolder, int, GPT, Tokenizer]]]:
    """Yield the path of each run with its folder, the step of its checkpoint, its model and its tokenizer."""
    folders = {path: RunFolder.open(path) for path in options["run"]}
    steps = {path: folder.load_checkpoint(options["step"], parts=()).step for path, folder in folders.items()}
    device, dtype = picked_device(options)
    keep_freed_memory()
    for path, step in steps.items():
        yield path, (folders[path], step, *load_model(path, step, device, dtype, options["rate"]))


def _dial(options: Mapping[str, Any]) -> None:
    """Measure each run's validation loss at each rate, write the numbers and the figure, and print a table."""
    asked = rates.read_rates(options["rates"])
    for path in options["run"]:
        rates.require_cutoffs(RunFolder.open(path), "at_rate", f"--rates {options['rates']}: ")
    with style():
        pass  # fails early without matplotlib
    results = {}
    for path, (folder, step, model, tokenizer) in _models(options):
        corpus = validation_text(folder, "evaluate a run that has it")
        most = options["eval_tokens"]
        enough = None if most is None else most + model.config.context
        with Display(Console(stderr=True), name=path) as display:
            tokens = pack(corpus, tokenizer, "validation", display.task("validation, tokenizing"), max_tokens=enough)
            progress = display.task("rates")
            points = measure_rates(model, tokens, tokenizer, asked, max_tokens=most, progress=progress)
        rule = model.config.rule
        assert rule is not None
        results[path] = rates.record(folder, step, rule, points)
        replace_json(folder.path / rates.FILE, results[path])
    if options["json"]:
        print(json.dumps(list(results.values())))
    else:
        Console().print(rates.rates_table(results))
    figure = Path(options["run"][0]) / "rates"
    save_figure(partial(rates.draw_dial, results), figure)
    print(f"figure: {figure}.png and .svg", file=sys.stderr)


# Options that have no effect unless one of the listed options is given.
NEEDS = {
    "tasks": ["bundle"],
    "baselines": ["bundle"],
    "max_per_task": ["bundle", "harness"],
    "harness_path": ["harness"],
    "text_field": ["data"],
    "eval_tokens": ["validation", "data"],
}
# Options that --rates does not support.
NOT_AT_RATES = ("rate", "data", "bundle", "harness", "tasks", "baselines", "max_per_task")


def _check(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise ValueError for options that leave nothing to do or have no effect."""
    if not any(options[name] for name in ("validation", "data", "bundle", "harness")):
        raise ValueError("--no-validation leaves nothing to do; add --data, --bundle or --harness")
    for name in [name for name in options if options[name] != defaults[name]]:
        if options["rates"] is not None and name in NOT_AT_RATES:
            only = f"--rates {options['rates']} measures only the validation loss"
            raise ValueError(f"{only}; leave {flag_of(name)} out")
        if name in NEEDS and not any(options[other] for other in NEEDS[name]):
            without = " or ".join(map(flag_of, NEEDS[name]))
            raise ValueError(f"{flag_of(name)} {options[name]} has no effect without {without}; add one")


def _tasks(options: Mapping[str, Any]) -> tuple[list[Task], list[str]]:
    """Return all tasks of the bundle and the labels of the tasks to evaluate."""
    if options["bundle"] is None:
        return [], []
    tasks = read_bundle(options["bundle"], options["baselines"])
    known = {task.label: task for task in tasks}
    asked: Collection[str] = known if options["tasks"] == "all" else parse_names("--tasks", options["tasks"], known)
    for label in asked:
        choose_rows(known[label], options["max_per_task"])  # rejects too few questions now rather than after an hour
    return tasks, [label for label in known if label in asked]


def _harness(options: Mapping[str, Any]) -> Harness | None:
    if options["harness"] is None:
        return None
    try:
        from ..integrations.lm_eval import Harness
    except ImportError as error:
        raise ValueError(f"--harness needs lm-evaluation-harness ({error}); run: {install('eval')}") from None
    return Harness(parse_names("--harness", options["harness"]), options["harness_path"])


class Run(NamedTuple):
    """A trained model and its results."""

    folder: RunFolder
    model: GPT
    tokenizer: Tokenizer
    results: Results
    display: Display

    def validate(self, eval_tokens: int | None) -> None:
        """Measure the loss on the run's own validation text. Raises ValueError if it is missing or has changed."""
        known = self.results.read().get("validation")
        if not _is_of(known, _validated_on(self.folder, NO_VALIDATION), eval_tokens):
            corpus = validation_text(self.folder, NO_VALIDATION)
            self.results.write("validation", self.losses("validation", corpus, eval_tokens))

    def measure_on(self, source: str, corpus: Corpus, eval_tokens: int | None) -> None:
        """Measure the loss on the held-out part of a source."""
        place = _place(source)
        if not _is_of(self._saved("data").get(place), corpus.hash, eval_tokens):
            found = self.losses(source, corpus, eval_tokens)
            self.results.write("data", self._saved("data") | {place: found})  # another process may have added some

    def _saved(self, section: str) -> dict[str, Any]:
        saved = self.results.read().get(section)
        return saved if isinstance(saved, dict) else {}

    def losses(self, what: str, corpus: Corpus, eval_tokens: int | None) -> dict[str, Any]:
        """Return the loss and bits per byte on the corpus's validation split with causal routing. If the rule looks
        ahead in training and the text fills a training batch, also return them with training pools."""
        rule = self.model.config.rule
        looks_ahead = rule is not None and rule.looks_ahead and self.results.rate is None
        pooled_at = training_batch(self.folder) if looks_ahead else None
        if looks_ahead and pooled_at is None:
            self.display.say(f"{what}: not by training pools, because {self.folder.path} does not record their size")
        batch = (pooled_at or 1) * self.model.config.context
        # Evaluation uses whole batches, and the last target needs one more token.
        enough = None if eval_tokens is None else eval_tokens + batch
        task = self.display.task
        tokens = pack(corpus, self.tokenizer, "validation", task(f"{what}, tokenizing"), max_tokens=enough)
        measure = partial(evaluate, self.model, tokens, self.tokenizer)
        causal = measure(max_tokens=eval_tokens, progress=task(what))
        self.display.say(f"{what}: loss {causal.loss:.4f}, {causal.bits_per_byte:.4f} bits per byte")
        result: dict[str, Any] = {"corpus": corpus.hash, "eval_tokens": eval_tokens, "bytes": causal.bytes}
        result |= causal.losses()
        if pooled_at is not None and len(tokens) > batch:
            how: Any = {"batch_size": pooled_at, "training_pools": True, "progress": task(f"{what} by training pools")}
            pooled = measure(max_tokens=eval_tokens, **how)
            if causal.tokens != pooled.tokens:
                causal = measure(max_tokens=pooled.tokens, progress=task(f"{what} on the same tokens"))
            same = {f"causal_{name}": number for name, number in causal.losses().items() if name != "tokens"}
            result["training_pools"] = {"batch_size": pooled_at} | pooled.losses() | same
        elif pooled_at is not None:
            self.display.say(f"{what}: too short to form training pools, since a batch has {batch:,} tokens")
        return result

    def ask_harness(self, harness: Harness, max_per_task: int | None) -> dict[str, Any]:
        """Return the results, keyed by task and metric, and save them along with the results of other tasks.

        Every task is evaluated each time, since the origin of its questions is unknown.
        """
        asked: dict[str, Any] = {}
        for name, found in harness.ask(self.model, self.tokenizer, self.display.task, max_per_task):
            self.display.say(f"{name}: done")
            asked |= found
            self.results.write("harness", self._saved("harness") | found)
        return asked


def training_batch(folder: RunFolder) -> int | None:
    """Return the number of sequences in a training micro-batch, or None if an imported model does not record it."""
    return int(folder.section("train")["batch_size"]) if "train" in folder.config else None


def _validated_on(folder: RunFolder, remedy: str) -> str:
    """Return the hash of the run's corpus. Raises ValueError with the remedy if it is unknown."""
    if not {"corpus", "data"} <= folder.config.keys():
        raise ValueError(f"{folder.path}: the validation text is not recorded; {remedy}")
    return str(folder.section("corpus")["hash"])


def validation_text(folder: RunFolder, remedy: str) -> Corpus:
    """Return the corpus of the run. Raises ValueError with the remedy if it is missing or has changed."""
    before = _validated_on(folder, remedy)
    config = DataConfig(**folder.section("data"))
    try:
        corpus = open_source(**asdict(config))
    except ValueError as error:
        raise ValueError(f"{folder.path}: its text cannot be read ({error}); restore it, or {remedy}") from None
    if corpus.hash != before:
        raise ValueError(f"{corpus.name} has changed since {folder.path} started; restore it, or {remedy}")
    return corpus


def _is_of(known: Any, corpus: str, eval_tokens: int | None) -> bool:
    """Return whether a section of evaluation.json is intact and was measured with these settings."""
    settings = {"corpus": corpus, "eval_tokens": eval_tokens}
    return isinstance(known, Mapping) and settings.items() <= known.items()


def _short_names(places: Sequence[str]) -> dict[str, str]:
    """Return the places, keyed by the shortest unique ending of their paths other than VALIDATION."""

    def ends(place: str) -> list[str]:
        parts = Path(place).parts
        return ["/".join(parts[-count:]) for count in range(1, len(parts))] + [place]

    taken = Counter(end for place in places for end in ends(place)) | Counter({VALIDATION: 2})
    return {next((end for end in ends(place) if taken[end] == 1), place): place for place in places}


def _place(source: str) -> str:
    """Return the key of a source's results, independent of the working directory."""
    return source if source == CODE else absolute(source)


def table(
    results: Mapping[str, Result], validation: bool, texts: Mapping[str, str], labels: Sequence[str], harness: bool
) -> Table:
    """Return the table. results: each run's evaluation.json, keyed by path. labels: the tasks of CORE.

    texts: the keys under which results on other texts are saved, keyed by the name to show. Each accuracy is followed
    by its centred accuracy, and each loss with training pools by its gap to the causal loss on the same tokens.
    """
    shown = Table()
    shown.add_column(no_wrap=True)
    for path in results:
        shown.add_column(Text(path, overflow="fold"), justify="right")

    def add(name: str, cells: Iterable[str]) -> None:
        shown.add_row(Text(name), *cells)

    found = list(results.values())
    losses = {VALIDATION: [result["validation"] for result in found]} if validation else {}
    losses |= {name: [result["data"][place] for result in found] for name, place in texts.items()}
    for name, measured in losses.items():
        pooled = [each.get("training_pools", {}) for each in measured]
        add(f"{name} tokens", (f"{each['tokens']:,}" for each in measured))
        for key, title in (("loss", "loss"), ("bits_per_byte", "bits per byte")):
            add(f"{name} {title}", (fixed(each[key], 4) for each in measured))
            if any(pooled):
                add("  by training pools, gap", (_show_gap(each, key) for each in pooled))
    for label in labels:
        tasks = [result["core"]["tasks"][label] for result in found]
        add(label, (f"{task['accuracy']:.4f} {task['centred']:+.4f}" for task in tasks))
    if labels:
        asked = [[result["core"]["tasks"][label] for label in labels] for result in found]
        add("CORE", (fixed(result["core"]["metric"], 4) for result in found))
        add("prompts cropped", map(_show_cropped, asked))
    for task, metrics in found[0]["harness"].items() if harness else ():
        for metric in metrics:
            add(f"{task} {metric}", (_show_metric(result["harness"][task][metric]) for result in found))
    return shown


def _show_gap(pooled: Result, key: str) -> str:
    if pooled.get(key) is None:
        return "–"
    return f"{pooled[key]:.4f} {pooled[f'causal_{key}'] - pooled[key]:+.4f}"


def _show_metric(found: Result) -> str:
    return fixed(found["value"], 4) + (f" ± {found['stderr']:.4f}" if found["stderr"] is not None else "")


def _show_cropped(results: Sequence[Result]) -> str:
    cropped, sequences = (sum(result[name] for result in results) for name in ("cropped", "sequences"))
    return f"{cropped:,} of {sequences:,}"

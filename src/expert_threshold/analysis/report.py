"""A run's report.html: what was trained, what it came to, and how experts were used, out of the run's records alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from html import escape
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from ..glossary import as_html
from ..model import PRESETS, GPTConfig, parameter_counts
from ..runs import RunFolder
from ..runs.files import replace_file
from . import figures, sentences
from .page import Exhibit, LeftOut, exhibits, left_out, page, table, text_block
from .records import Points, Record, expert_series, finite, layer_series, series
from .sentences import counted, short

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Run(NamedTuple):
    """The records of a run."""

    name: str
    config: dict[str, Any]
    model: GPTConfig
    train: Sequence[Record]
    validation: Sequence[Record]
    events: Sequence[Record]
    samples: list[tuple[str, str]]  # name and text, first to last
    step: int  # steps made, as far as records and checkpoints tell

    @property
    def rule(self) -> dict[str, Any]:
        rule: dict[str, Any] = self.config["model"]["rule"]
        return rule

    @property
    def warmup_steps(self) -> int:
        return 0 if self.model.rule is None else self.model.rule.warmup

    @property
    def target(self) -> float:
        """The share of the tokens that an expert is meant to get."""
        assert self.model.rule is not None
        return self.model.rule.experts_per_token / self.model.rule.num_experts

    @property
    def tokens_per_step(self) -> int:
        train = self.config["train"]
        return int(train["batch_size"] * train["accumulation"] * self.model.context)

    @property
    def bits_per_byte(self) -> Points:
        """(tokens trained on, bits per byte) of every validation."""
        return [(step * self.tokens_per_step, bits) for step, bits in series(self.validation, "bits_per_byte")]

    @property
    def fanout_counts(self) -> dict[int, list[int]]:
        """Layer -> tokens by fanout, in the last validation."""
        last = self.validation[-1]["layers"] if self.validation else {}
        return {int(layer): values["fanout_counts"] for layer, values in last.items() if any(values["fanout_counts"])}


def write_report(folder: RunFolder) -> Path:
    """Write report.html into the run folder and return its path.

    Raises ValueError with the remedy if a record is damaged or matplotlib is missing; OSError where the disk is full.
    """
    # A path in config.json may hold bytes that are no UTF-8.
    replace_file(folder.report, report(read_run(folder)).encode(errors="replace"))
    return folder.report


def read_run(folder: RunFolder) -> Run:
    """Raises ValueError if a record is damaged."""
    config, records = folder.config, folder.metrics.read()
    samples = [
        (re.sub("_0*", " ", path.stem), path.read_text(encoding="utf-8", errors="replace"))
        for path in sorted(folder.samples.glob("step_*.txt"))
    ]
    train, validation, events = ([r for r in records if r["split"] == s] for s in ("train", "validation", "event"))
    step = max([record["step"] for record in records] + folder.checkpoints(), default=0)
    name, model = folder.path.resolve().name, GPTConfig.from_dict(config["model"])
    return Run(name, config, model, train, validation, events, samples, step)


def report(run: Run) -> str:
    """The page, whole in itself. Raises ValueError with the remedy if matplotlib is missing."""
    chosen = {"Learning": list(learning(run)), "Routing": list(routing(run))}
    missing = [entry for entries in chosen.values() for entry in entries if isinstance(entry, LeftOut)]
    return page(
        f"{run.name}: {_name(run)}",
        [
            header(run),
            as_html(),
            warnings(run),
            *(exhibits(title, [e for e in entries if isinstance(e, Exhibit)]) for title, entries in chosen.items()),
            samples(run),
            left_out(missing),
            validations(run),
            configuration(run),
        ],
    )


def learning(run: Run) -> Iterator[Exhibit | LeftOut]:
    train, validation, bits = run.train, run.validation, run.bits_per_byte
    yield _entry(
        "Loss",
        "no loss was recorded yet",
        finite(series(train, "cross_entropy")) or finite(series(validation, "loss")),
        partial(figures.loss, train, validation),
        partial(sentences.loss, train, validation),
        wide=True,
    )
    yield _entry(
        "Bits per byte",
        "the run was not validated yet",
        finite(bits),
        partial(figures.bits_per_byte, bits),
        partial(sentences.bits_per_byte, bits),
    )
    yield _entry(
        "Tokens per second",
        "no line of training metrics was written yet",
        finite(series(train, "tokens_per_second")),
        partial(figures.speed, train),
        partial(sentences.speed, train),
    )


def routing(run: Run) -> Iterator[Exhibit | LeftOut]:
    if run.model.rule is None or run.model.dense_layers == run.model.layers:
        names = "Usage, load spread, fanout, cutoffs, saturation, starvation, spread of scores and gates"
        yield LeftOut(names, "no layer of this model has routed experts")
        return
    train, validation, warmup = run.train, run.validation, run.warmup_steps
    # A line tells of the steps since the one before, so the first to tell of none in warmup is an interval after it.
    last_warm = warmup + run.config["train"]["log_every"] - 1 if warmup else 0
    rule = run.model.rule
    exact_until = math.inf if rule.looks_ahead else last_warm
    unrecorded = "no number of it was recorded yet"
    no_cutoff = f"the rule {_name(run)} does not compare scores with a cutoff"
    of_cutoff = no_cutoff if rule.thresholds(rule.init()) is None else unrecorded
    yield _entry(
        "Usage of each expert",
        unrecorded,
        expert_series(train, "usage"),
        lambda width: figures.usage(train, run.target, width),
        partial(sentences.usage, train, run.target),
        wide=True,
    )
    yield _entry(
        "Load spread",
        unrecorded,
        layer_series(train, "load_spread") or layer_series(validation, "load_spread"),
        lambda width: figures.load_spread(train, validation, warmup, width),
        partial(sentences.load_spread, train, validation),
        wide=True,
    )
    yield _entry(
        "Fanout",
        "the run was not validated yet",
        run.fanout_counts,
        partial(figures.fanout, run.fanout_counts),
        lambda: sentences.fanout(run.fanout_counts, run.rule["experts_per_token"]),
        wide=True,
    )
    yield _entry(
        "Cutoffs",
        of_cutoff,
        expert_series(train, "cutoff"),
        lambda width: figures.cutoffs(train, warmup, width),
        partial(sentences.cutoffs, train),
        wide=True,
    )
    yield _entry(
        "Saturation",
        of_cutoff,
        layer_series(train, "saturation"),
        lambda width: figures.saturation(train, warmup, width),
        partial(sentences.saturation, train, exact_until),
    )
    yield _entry(
        "Starvation",
        of_cutoff,
        layer_series(train, "starvation"),
        lambda width: figures.starvation(train, warmup, width),
        partial(sentences.starvation, train, exact_until),
    )
    yield _entry(
        "Spread of scores",
        unrecorded,
        layer_series(train, "score_std"),
        partial(figures.score_spread, train),
        partial(sentences.score_spread, train),
    )
    yield _entry(
        "Spread of gates",
        unrecorded,
        layer_series(train, "gate_std"),
        partial(figures.gate_spread, train),
        partial(sentences.gate_spread, train),
    )


def _entry(
    title: str,
    why_not: str,
    numbers: object,
    draw: Callable[[float], Figure],
    say: Callable[[], str],
    wide: bool = False,
) -> Exhibit | LeftOut:
    """The figure if there are numbers for it, else the reason why not."""
    return Exhibit(title, say(), draw, wide) if numbers else LeftOut(title, why_not)


def header(run: Run) -> str:
    """What was trained, and what it came to."""
    parameters = parameter_counts(run.model)
    title = f"{_name(run)[0].upper()}{_name(run)[1:]}, {short(parameters['total'])} parameters"
    numbers = "".join(f"<li><b>{escape(value)}</b>{escape(what)}</li>" for value, what in _numbers(run))
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in _facts(run, parameters))
    return (
        f'<header><h1>{escape(title)}</h1><p class="muted">Run {escape(run.name)}</p>\n'
        f'<ul class="numbers">{numbers}</ul>\n<dl>{facts}</dl></header>'
    )


def _numbers(run: Run) -> Iterator[tuple[str, str]]:
    bits, losses = finite(run.bits_per_byte), finite(series(run.validation, "loss"))
    if bits and losses:
        yield f"{bits[-1][1]:.3f}", "bits per byte, validation"
        yield f"{losses[-1][1]:.3f}", "nats per token, validation"
    if run.train:
        yield short(run.train[-1]["tokens"]), "tokens trained on"
        yield duration(run.train[-1]["seconds"]), "training"
    rates = [rate for _, rate in finite(series(run.train, "tokens_per_second"))]
    if rates:
        yield f"{median(rates):,.0f}", "tokens per second"


def _facts(run: Run, parameters: dict[str, int]) -> Iterator[tuple[str, str]]:
    model, train, corpus, versions = (run.config[key] for key in ("model", "train", "corpus", "versions"))
    preset = [name for name, sizes in PRESETS.items() if sizes.items() <= model.items()]
    yield (
        "Model",
        f"{f'{preset[0]}: ' if preset else ''}{model['layers']} layers of width {model['d_model']}, {model['heads']} "
        f"heads, context {model['context']:,}, vocabulary {model['vocab_size']:,}",
    )
    yield "Parameters", f"{parameters['total']:,} in all, {parameters['active']:,} active for a token"
    options = ", ".join(f"{key} {_plain(value)}" for key, value in run.rule.items() if key != "name")
    yield "Rule", f"{run.rule['name']}{': ' if options else ''}{options}"
    if run.model.rule is not None:
        yield "Experts", f"width {model['d_expert']}, {model['shared_experts']} shared"
    yield "Corpus", f"{corpus['name']}, {short(corpus['bytes'])} bytes, sha256 {corpus['hash'][:16]}"
    yield "Steps", f"{run.step:,} of {train['steps']:,}, {run.tokens_per_step:,} tokens each; seed {train['seed']}"
    if run.config["init_from"] is not None:
        yield "Began with", run.config["init_from"]
    threads = f", {counted(train['threads'], 'thread')}" if train["device"] == "cpu" else ""
    yield "Machine", f"{train['device']}, {train['dtype']}{threads}"
    yield "Versions", ", ".join(f"{name.replace('_', '-')} {version}" for name, version in versions.items())


def warnings(run: Run) -> str:
    """What went wrong while training, if anything did."""
    lines = []
    skipped = [f"{record['step']:,}" for record in run.events if record["event"] == "skipped_step"]
    if skipped:
        lines.append(f"Skipped because the loss, a gradient or scores were not finite: {_some(skipped, 'step')}.")
    dead = [
        f"{record['expert']} of layer {record['layer']} (up to step {record['step']:,})"
        for record in run.events
        if record["event"] == "dead_expert"
    ]
    if dead:
        lines.append(f"Got no token between two lines of metrics: {_some(dead, 'expert')}.")
    if not lines:
        return ""
    return f"<section><h2>Warnings</h2>{''.join(f'<p>{escape(line)}</p>' for line in lines)}</section>"


def samples(run: Run) -> str:
    """The last sample, and those before it folded away."""
    if not run.samples:
        return ""
    *earlier, (name, text) = run.samples
    folded = "".join(
        f"<details><summary>{escape(name)}</summary>{text_block(text)}</details>" for name, text in reversed(earlier)
    )
    return f"<section><h2>What it writes</h2><p>After {escape(name)}:</p>{text_block(text)}{folded}</section>"


def validations(run: Run) -> str:
    """Every validation as a row."""
    if not run.validation:
        return ""
    head = ("step", "tokens trained on", "loss", "bits per byte", "mean fanout", "load spread, worst layer")
    rows = []
    for record in run.validation:
        layers = record["layers"].values()
        fanouts = [layer["fanout_mean"] for layer in layers if layer["fanout_mean"] is not None]
        spreads = [layer["load_spread"] for layer in layers if layer["load_spread"] is not None]
        rows.append(
            (
                f"{record['step']:,}",
                f"{record['step'] * run.tokens_per_step:,}",
                _number(record["loss"], 4),
                _number(record["bits_per_byte"], 4),
                _number(sum(fanouts) / len(fanouts) if fanouts else None, 2),
                _number(max(spreads, default=None), 2),
            )
        )
    return f"<section><h2>Validation</h2>{table(head, rows)}</section>"


def configuration(run: Run) -> str:
    """All of config.json, folded away."""
    text = json.dumps(run.config, indent=2, ensure_ascii=False)
    return (
        f"<section><h2>Configuration</h2><details><summary>config.json</summary>{text_block(text)}</details></section>"
    )


def duration(seconds: float) -> str:
    """Two units: 42 s, 3 min 05 s, 2 h 10 min."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minute:02} min"
    return f"{minute} min {second:02} s" if minute else f"{second} s"


def _name(run: Run) -> str:
    name = str(run.rule["name"]).replace("_", " ")
    return name if run.model.rule is None else f"{name} ({run.model.rule.label})"


def _plain(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _some(items: list[str], what: str) -> str:
    """Ten of them at most: `steps 3, 4 and 5 more`."""
    more = f" and {len(items) - 10} more" if len(items) > 10 else ""
    return f"{what}{'s' if len(items) > 1 else ''} {', '.join(items[:10])}{more}"

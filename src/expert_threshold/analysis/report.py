"""Writes a run's report.html from its records alone: its configuration, results and use of experts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from html import escape
from pathlib import Path
from statistics import median

from ..files import replace_file
from ..glossary import as_html
from ..model import PRESETS, parameter_counts
from ..runs import RunFolder
from .figures.training import LEARNING, ROUTING, drawn
from .page import exhibits, facts, folded, left_out, page, section, text, text_block
from .records import Run, finite, read_run, series
from .sentences import counted, short


def write_report(folder: RunFolder, say: Callable[[str], None] = lambda line: None) -> Path:
    """Write report.html into the run folder and return its path. say: called with a line about each figure that failed.

    Raises ValueError with the remedy if a record is damaged or matplotlib is missing, and OSError if the disk is full.
    """
    run = read_run(folder)
    learning, routing = list(drawn(LEARNING, run)), list(drawn(ROUTING, run))
    for entry in (*learning, *routing):
        if entry.failed:
            say(f"warning: the figure {entry.title} of the report failed: {entry.caption}")
    body = [header(run), as_html(), warnings(run), exhibits("Learning", learning), exhibits("Routing", routing)]
    config = folded("config.json", text_block(json.dumps(run.config, indent=2, ensure_ascii=False)))
    body += [samples(folder), left_out([*learning, *routing]), section("Configuration", config)]
    content = page(f"{folder.path.resolve().name}: {run.rule_name}", body)
    # A path in config.json may contain bytes that are not UTF-8.
    replace_file(folder.report, content.encode(errors="replace"))
    return folder.report


def header(run: Run) -> str:
    """Return the title, the main results and a summary of the configuration."""
    parameters = parameter_counts(run.model)
    title = f"{run.rule_name[0].upper()}{run.rule_name[1:]}, {short(parameters['total'])} parameters"
    # Check for compare.json: the page of a comparison is written after the reports of its runs.
    path = run.folder.path.resolve()
    inside = (path.parents[1] / "compare.json").is_file()
    comparison = '<nav><a href="../../compare.html">Comparison with this run</a></nav>' if inside else ""
    numbers = "".join(f"<li><b>{escape(value)}</b>{escape(what)}</li>" for value, what in _numbers(run))
    return (
        f"<header><h1>{escape(title)}</h1>{text(f'Run {path.name}', muted=True)}\n"
        f'<ul class="numbers">{numbers}</ul>\n{facts(_facts(run, parameters))}{comparison}</header>'
    )


def _numbers(run: Run) -> Iterator[tuple[str, str]]:
    bits, losses = finite(run.bits_per_byte), finite(series(run.validation, "loss"))
    if bits and losses:
        yield f"{bits[-1][1]:.3f}", "bits per byte, validation"
        yield f"{losses[-1][1]:.3f}", "nats per token, validation"
    if run.train:
        yield short(run.train[-1]["tokens"]), "tokens trained on"
        yield str(timedelta(seconds=round(run.train[-1]["seconds"]))), "training, h:mm:ss"
    rates = [rate for _, rate in finite(series(run.train, "tokens_per_second"))]
    if rates:
        yield f"{median(rates):,.0f}", "tokens per second"


def _facts(run: Run, parameters: dict[str, int]) -> Iterator[tuple[str, str]]:
    model, rule, train, corpus, versions = (run.config[key] for key in ("model", "rule", "train", "corpus", "versions"))
    records = (*run.train, *run.validation, *run.events)
    step = max([record["step"] for record in records] + run.folder.checkpoints(), default=0)
    preset = next((f"{name}: " for name, sizes in PRESETS.items() if sizes.items() <= model.items()), "")
    size = f"{model['layers']} layers of width {model['d_model']}, {model['heads']} heads"
    yield "Model", f"{preset}{size}, context {model['context']:,}, vocabulary {model['vocab_size']:,}"
    yield "Parameters", f"{parameters['total']:,} in total, {parameters['active']:,} active per token"
    name, *options = (_plain(value) if key == "name" else f"{key} {_plain(value)}" for key, value in rule.items())
    yield "Rule", f"{name}{': ' if options else ''}{', '.join(options)}"
    if run.model.rule is not None:
        yield "Experts", f"width {model['d_expert']}, {model['shared_experts']} shared"
    yield "Corpus", f"{corpus['name']}, {short(corpus['bytes'])} bytes, sha256 {corpus['hash'][:16]}"
    yield "Steps", f"{step:,} of {train['steps']:,}, {run.tokens_per_step:,} tokens each; seed {train['seed']}"
    if run.config["init_from"] is not None:
        yield "Initialised from", run.config["init_from"]
    threads = f", {counted(train['threads'], 'thread')}" if train["device"] == "cpu" else ""
    yield "Machine", f"{train['device']}, {train['dtype']}{threads}"
    yield "Versions", ", ".join(f"{name.replace('_', '-')} {version}" for name, version in versions.items() if version)
    if "command" in run.config:
        yield "Command", run.config["command"]


def warnings(run: Run) -> str:
    """Return a section on skipped steps and dead experts, or an empty string if there were none."""
    lines = []
    if skipped := [f"{event['step']:,}" for event in run.events if event["event"] == "skipped_step"]:
        lines.append(f"Skipped because the loss, a gradient or scores were not finite: {_some(skipped, 'step')}.")
    dead = [event for event in run.events if event["event"] == "dead_expert"]
    if names := [f"{event['expert']} of layer {event['layer']} (up to step {event['step']:,})" for event in dead]:
        lines.append(f"Received no tokens between two lines of metrics: {_some(names, 'expert')}.")
    return section("Warnings", *map(text, lines))


def samples(folder: RunFolder) -> str:
    """Return the last sample, with earlier samples collapsed."""
    shown: list[str] = []
    for path in sorted(folder.samples.glob("step_*.txt"), reverse=True):
        name, sample = re.sub("_0*", " ", path.stem), text_block(path.read_text(encoding="utf-8", errors="replace"))
        shown.append(folded(name, sample) if shown else text(f"After {name}:") + "\n" + sample)
    return section("Samples", *shown)


def _plain(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _some(items: list[str], what: str) -> str:
    """Return up to ten items and the number of others: `steps 3, 4 and 5 more`."""
    more = f" and {len(items) - 10} more" if len(items) > 10 else ""
    return f"{what}{'s' if len(items) > 1 else ''} {', '.join(items[:10])}{more}"

"""The output of `et analyze`: files for each figure, and a page that shows all figures, each with a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from itertools import chain
from pathlib import Path

from ..files import replace_file, to_json
from ..glossary import as_html
from ..model import parameter_counts
from .figures.study import Study
from .figures.style import style
from .material import Material
from .methods import Subject, legend, options
from .page import (
    Exhibit,
    LeftOut,
    attempt,
    exhibits,
    left_out,
    links,
    options_that_differ,
    page,
    save_figure,
    section,
    table,
    text,
)
from .plain import Data, plain
from .results import HEADERS, NOTES, cells, read_result, summarise
from .sentences import counted, listed, short


def write_atlas(material: Material, out: Path, studies: Sequence[Study], say: Callable[[str], None]) -> Path:
    """Write each figure as PNG and SVG, with its data as JSON, and report.html into `out`; return the report's path.

    say: called with a line about each figure. A figure that fails is reported there and on the page. Raises ValueError
    if matplotlib is missing, or if figures failed and none was drawn.
    """
    with style():
        pass  # fails early without matplotlib
    out.mkdir(parents=True, exist_ok=True)
    entries: dict[str, list[Exhibit | LeftOut]] = {}
    partly: list[LeftOut] = []
    for number, study in enumerate(studies, start=1):
        entry = attempt(study.title, lambda study=study: save(study, study.compute(material), out, partly))  # type: ignore[misc]
        entries.setdefault(study.section, []).append(entry)
        how = (
            entry.sentence
            if isinstance(entry, Exhibit)
            else f"{'failed' if entry.failed else 'left out'}: {entry.reason}"
        )
        say(f"figure {number}/{len(studies)} {study.name}: {how}")
    every = [entry for found in entries.values() for entry in found]
    failed = [entry.reason for entry in every if isinstance(entry, LeftOut) and entry.failed]
    if failed and not any(isinstance(entry, Exhibit) for entry in every):
        raise ValueError(failed[0])
    report = out / "report.html"
    replace_file(report, render(material, entries, partly, out).encode(errors="replace"))
    return report


def save(study: Study, computed: Data, out: Path, partly: list[LeftOut]) -> Exhibit:
    """Draw and save a figure with its data. Omitted methods are added to `partly`, with reasons."""
    content = to_json(plain(computed), indent=1)
    data = json.loads(content)  # draw from the same rounded numbers as the file
    replace_file(out / f"{study.name}.json", (content + "\n").encode())
    sentence = study.say(data)
    figure = save_figure(partial(study.draw, data), out / study.name)
    reasons: dict[str, list[str]] = {}
    for method, reason in data.get("left_out", {}).items():
        reasons.setdefault(reason, []).append(method)
    partly += [LeftOut(f"{study.title} of {listed(names)}", reason) for reason, names in reasons.items()]
    return Exhibit(study.title, sentence, figure, study.name)


def render(
    material: Material, entries: dict[str, list[Exhibit | LeftOut]], partly: Sequence[LeftOut], out: Path
) -> str:
    """Return the page: figures, tables, and the list of omissions."""
    methods = list(material.methods)
    title = f"{counted(len(material.subjects), 'run')} of {counted(len(methods), 'method')}"
    runs = [LeftOut(f"Run {path}", why) for path, why in material.selection.left_out.items()]
    return page(
        f"Analysis of {', '.join(methods)}",
        [
            f"<header><h1>{escape(title)}</h1>{_incomplete(material)}"
            f"{text(legend(material.subjects), muted=True)}</header>",
            as_html(),
            *(exhibits(title, found) for title, found in entries.items()),
            _results(material),
            _runs(material.subjects, out),
            options_that_differ({method: options(subjects[0].run) for method, subjects in material.methods.items()}),
            left_out([*chain.from_iterable(entries.values()), *partly, *runs]),
        ],
    )


def _incomplete(material: Material) -> str:
    """Return paragraphs on the runs left out and on the unfinished runs that are shown."""
    _, left_out, unfinished = material.selection
    parts = {f"{counted(len(left_out), 'run')} left out": left_out, "Unfinished, shown as far as they got": unfinished}
    lines = {what: "; ".join(f"{path}: {why}" for path, why in runs.items()) for what, runs in parts.items()}
    return "".join(text(f"{what}: {line}.") for what, line in lines.items() if line)


def _results(material: Material) -> str:
    """Return the results of each method, as the table of `et compare`."""
    results, without = [], []
    for method, subjects in material.methods.items():
        read = (read_result(s.folder, method, s.run.config["train"]["seed"]) for s in subjects)
        found = [result for result in read if result is not None]
        results += found
        without += [] if found else [method]
    if not results:
        return ""
    rows = cells(summarise(results), lambda text: text)
    notes = NOTES + (f" Without a final validation, so not in this table: {listed(without)}." if without else "")
    return section("Results", table(HEADERS, rows, "Results"), text(notes, muted=True))


def _runs(subjects: Sequence[Subject], out: Path) -> str:
    """Return a table of the analysed runs, with links to their reports."""
    head = ("run", "method", "seed", "step", "tokens", "parameters", "active")
    rows = []
    for subject in subjects:
        parameters = parameter_counts(subject.run.model)
        step, steps = subject.steps
        rows.append(
            (
                str(subject.folder.path),
                subject.method,
                str(subject.run.config["train"]["seed"]),
                f"{step:,}" if step == steps else f"{step:,} of {steps:,}",
                short(step * subject.run.tokens_per_step),
                short(parameters["total"]),
                short(parameters["active"]),
            )
        )
    reports = {f"{s.method}, seed {s.run.config['train']['seed']}": s.folder.report for s in subjects}
    return section("Runs", table(head, rows, "Runs"), links(reports, out))

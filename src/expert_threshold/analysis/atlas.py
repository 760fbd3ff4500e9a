"""The output of `et analyze`: files for each figure, and a page with all figures and a sentence about each."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from html import escape
from pathlib import Path

from ..files import replace_file, to_json
from ..glossary import as_html
from ..model import parameter_counts
from .comparison import HEADERS, NOTES, cells, read_result, summarise
from .figures.study import Study
from .figures.style import NARROW, WIDE, style
from .material import Material, NotShownError
from .methods import Subject, legend
from .page import Exhibit, LeftOut, exhibits, left_out, page, save_figure, table
from .plain import Data, plain
from .sentences import counted, listed, short


def write_atlas(material: Material, out: Path, studies: Sequence[Study], say: Callable[[str], None]) -> Path:
    """Write each figure as PNG and SVG, with its data as JSON, and report.html into `out`; return the report's path.

    say: called with a line about each figure. Raises ValueError if a run is damaged or something to install is missing.
    """
    with style():
        pass  # fails early without matplotlib
    out.mkdir(parents=True, exist_ok=True)
    shown: dict[str, list[Exhibit]] = {}
    missing: list[LeftOut] = []
    for number, study in enumerate(studies, start=1):
        place = f"figure {number}/{len(studies)} {study.name}"
        try:
            exhibit, partly = save(study, study.compute(material), out)
        except NotShownError as reason:
            missing.append(LeftOut(study.title, str(reason)))
            say(f"{place}: left out: {reason}")
        else:
            shown.setdefault(study.section, []).append(exhibit)
            missing += partly
            say(f"{place}: {exhibit.sentence}")
    report = out / "report.html"
    missing = [*missing, *(LeftOut(f"Run {path}", why) for path, why in material.selection.left_out.items())]
    replace_file(report, render(material, shown, missing).encode(errors="replace"))
    return report


def save(study: Study, computed: Data, out: Path) -> tuple[Exhibit, list[LeftOut]]:
    """Draw and save a figure with its data. Return the figure, and the methods that it leaves out, with reasons."""
    text = to_json(plain(computed), indent=1)
    data = json.loads(text)  # draw from the same rounded numbers as the file
    replace_file(out / f"{study.name}.json", (text + "\n").encode())
    draw = cache(partial(study.draw, data))
    save_figure(partial(draw, WIDE if study.wide else NARROW), out / study.name)
    reasons: dict[str, list[str]] = {}
    for method, reason in data.get("left_out", {}).items():
        reasons.setdefault(reason, []).append(method)
    partly = [LeftOut(f"{study.title} of {listed(names)}", reason) for reason, names in reasons.items()]
    rows = study.rows(data) if study.rows else None
    return Exhibit(study.title, study.say(data), draw, study.wide, study.name, rows), partly


def render(material: Material, shown: dict[str, list[Exhibit]], missing: Sequence[LeftOut]) -> str:
    """Return the page: figures, tables, and the list of omissions."""
    methods = list(material.methods)
    return page(
        f"Analysis of {', '.join(methods)}",
        [
            f"<header><h1>{escape(_title(material))}</h1>{_incomplete(material)}"
            f'<p class="muted">{escape(legend(material.subjects))}</p></header>',
            as_html(),
            *(exhibits(section, entries) for section, entries in shown.items()),
            _results(material),
            _runs(material.subjects),
            left_out(missing),
        ],
    )


def _title(material: Material) -> str:
    return f"{counted(len(material.subjects), 'run')} of {counted(len(material.methods), 'method')}"


def _incomplete(material: Material) -> str:
    """Return the runs left out and the unfinished runs that are shown."""
    left_out, unfinished = material.selection.left_out, material.selection.unfinished
    lines = [f"{counted(len(left_out), 'run')} left out: {'; '.join(f'{p}: {w}' for p, w in left_out.items())}."]
    lines += [f"Shown as far as they went: {'; '.join(f'{path}: {how}' for path, how in unfinished.items())}."]
    shown = [line for line, runs in zip(lines, (left_out, unfinished), strict=True) if runs]
    return "".join(f"<p>{escape(line)}</p>" for line in shown)


def _results(material: Material) -> str:
    """Return the results of each method in the table of `et compare`."""
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
    return f'<section><h2>Results</h2>{table(HEADERS, rows)}<p class="muted">{escape(notes)}</p></section>'


def _runs(subjects: Sequence[Subject]) -> str:
    """Return the table of analysed runs."""
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
    return f"<section><h2>Runs</h2>{table(head, rows)}</section>"

"""Writes the output of `et analyze`: the files of each figure, and a page that shows all figures with captions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from pathlib import Path

from ..files import replace_file, to_json
from ..glossary import as_html
from ..model import parameter_counts
from .figures import SECTIONS
from .figures.style import Figure, style
from .material import Material, Study
from .methods import legend
from .page import Exhibit, exhibit, exhibits, links, options_that_differ, page, save_figure, section, table, text
from .page import left_out as list_left_out
from .plain import plain
from .records import Run
from .results import HEADERS, NOTES, cells, summarise
from .sentences import counted, listed, short


def write_atlas(material: Material, out: Path, studies: Sequence[Study], say: Callable[[str], None]) -> Path:
    """Write each figure as PNG and SVG, with its data as JSON, and report.html into `out`; return the report's path.

    say: called with a line about each figure. A figure that fails is reported there and on the page. Raises ValueError
    if matplotlib is missing, or if figures failed and none was drawn.
    """
    with style():
        pass  # fails early without matplotlib
    out.mkdir(parents=True, exist_ok=True)
    shown: dict[str, Exhibit] = {}
    partly: list[Exhibit] = []
    for number, study in enumerate(studies, start=1):
        entry = shown[study.name] = exhibit(study.title, partial(save, study, material, out, partly), study.name)
        how = "" if entry.figure is not None else "failed: " if entry.failed else "left out: "
        say(f"figure {number}/{len(studies)} {study.name}: {how}{entry.caption}")
    failed = [entry.caption for entry in shown.values() if entry.failed]
    if failed and all(entry.figure is None for entry in shown.values()):
        raise ValueError(failed[0])
    title = f"{counted(len(material.runs), 'run')} of {counted(len(material.methods), 'method')}"
    body = [
        f"<header><h1>{escape(title)}</h1>{_incomplete(material)}{text(legend(material.runs), muted=True)}</header>",
        as_html(),
    ]
    for name, figures in SECTIONS.items():
        body.append(exhibits(name, [shown[figure.name] for figure in figures if figure.name in shown]))
    body += [_results(material), _runs(material.runs, out), options_that_differ(material.runs)]
    runs = [Exhibit(f"Run {path}", why) for path, why in material.selection.left_out.items()]
    body.append(list_left_out([*shown.values(), *partly, *runs]))
    report = out / "report.html"
    replace_file(report, page(f"Analysis of {', '.join(material.methods)}", body).encode(errors="replace"))
    return report


def save(study: Study, material: Material, out: Path, partly: list[Exhibit]) -> tuple[str, Figure]:
    """Draw a figure and save it with its data. Return its caption and the figure. Omitted methods go to `partly`."""
    content = to_json(plain(study.compute(material)), indent=1)
    data = json.loads(content)  # draw from the same rounded numbers as the file
    replace_file(out / f"{study.name}.json", (content + "\n").encode())
    reasons: dict[str, list[str]] = {}
    for method, reason in data.get("left_out", {}).items():
        reasons.setdefault(reason, []).append(method)
    partly += [Exhibit(f"{study.title} of {listed(names)}", reason) for reason, names in reasons.items()]
    return study.say(data), save_figure(partial(study.draw, data), out / study.name)


def _incomplete(material: Material) -> str:
    """Return paragraphs that list the runs left out and the unfinished runs that are shown."""
    _, left_out, unfinished = material.selection
    parts = {f"{counted(len(left_out), 'run')} left out": left_out, "Unfinished, shown as far as they got": unfinished}
    lines = {what: "; ".join(f"{path}: {why}" for path, why in runs.items()) for what, runs in parts.items()}
    return "".join(text(f"{what}: {line}.") for what, line in lines.items() if line)


def _results(material: Material) -> str:
    """Return the results of each method in the same table as `et compare`."""
    results = [run.result for run in material.runs if run.result is not None]
    if not results:
        return ""
    without = [method for method in material.methods if method not in {result.method for result in results}]
    notes = NOTES + (f" Without a final validation, so not in this table: {listed(without)}." if without else "")
    return section("Results", table(HEADERS, cells(summarise(results), str), "Results"), text(notes, muted=True))


def _runs(runs: Sequence[Run], out: Path) -> str:
    """Return a table of the analysed runs, with links to their reports."""
    rows = []
    for run in runs:
        step, steps = run.steps
        done = f"{step:,}" if step == steps else f"{step:,} of {steps:,}"
        parameters = parameter_counts(run.model)
        counts = map(short, (step * run.tokens_per_step, parameters["total"], parameters["active"]))
        rows.append((str(run.folder.path), run.method, str(run.seed), done, *counts))
    head = ("run", "method", "seed", "step", "tokens", "parameters", "active")
    return section("Runs", table(head, rows, "Runs"), links(runs, out))

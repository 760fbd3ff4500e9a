"""All figures of some runs: files of each, and one page that shows them with a sentence on what is seen."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from html import escape
from pathlib import Path

from ..model import parameter_counts
from ..runs.files import replace_file, to_json
from .comparison import HEADERS, NOTES, cells, read_result, summarise
from .figures import NARROW, WIDE, style
from .material import Material, NotShownError
from .methods import LEGEND, Subject
from .page import Exhibit, LeftOut, exhibits, left_out, page, save_figure, table
from .plain import Data, plain
from .sentences import listed, short
from .studies import STUDIES, Study


def write_atlas(
    material: Material, out: Path, studies: Sequence[Study] = STUDIES, say: Callable[[str], None] = lambda line: None
) -> Path:
    """Write each figure as PNG and SVG, with its data as JSON, and report.html into `out`; return the report's path.

    say is told a line about each figure. Raises ValueError if a run is damaged or something to install is missing.
    """
    with style():
        pass  # without matplotlib there is nothing to begin
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
    replace_file(report, render(material, shown, missing).encode(errors="replace"))
    return report


def save(study: Study, computed: Data, out: Path) -> tuple[Exhibit, list[LeftOut]]:
    """Draw and save one figure with its data; and the methods it leaves out, by reason."""
    text = to_json(plain(computed), indent=1)
    data = json.loads(text)  # what is drawn is what the file says
    replace_file(out / f"{study.name}.json", (text + "\n").encode())
    draw = cache(partial(study.draw, data))
    save_figure(draw(WIDE if study.wide else NARROW), out / study.name)
    reasons: dict[str, list[str]] = {}
    for method, reason in data.get("left_out", {}).items():
        reasons.setdefault(reason, []).append(method)
    partly = [LeftOut(f"{study.title} of {listed(names)}", reason) for reason, names in reasons.items()]
    rows = study.rows(data) if study.rows else None
    return Exhibit(study.title, study.say(data), draw, study.wide, study.name, rows), partly


def render(material: Material, shown: dict[str, list[Exhibit]], missing: Sequence[LeftOut]) -> str:
    """The page: figures first, then tables, then what was left out."""
    methods = list(material.methods)
    return page(
        f"Analysis of {', '.join(methods)}",
        [
            f'<header><h1>{escape(_title(material))}</h1><p class="muted">{escape(LEGEND)}</p></header>',
            *(exhibits(section, entries) for section, entries in shown.items()),
            _results(material),
            _runs(material.subjects),
            left_out(missing),
        ],
    )


def _title(material: Material) -> str:
    runs, methods = len(material.subjects), len(material.methods)
    return f"{runs} run{'s' if runs > 1 else ''} of {methods} method{'s' if methods > 1 else ''}"


def _results(material: Material) -> str:
    """What each method reached, as `et compare` has it."""
    results = []
    for method, subjects in material.methods.items():
        read = (read_result(s.folder, method, s.run.config["train"]["seed"]) for s in subjects)
        results += [result for result in read if result is not None]
    if not results:
        return ""
    rows = cells(summarise(results), lambda text: text)
    return f'<section><h2>Results</h2>{table(HEADERS, rows)}<p class="muted">{escape(NOTES)}</p></section>'


def _runs(subjects: Sequence[Subject]) -> str:
    """What was analysed."""
    head = ("run", "method", "seed", "step", "tokens", "parameters", "active")
    rows = []
    for subject in subjects:
        parameters = parameter_counts(subject.run.model)
        step = subject.folder.latest_checkpoint() or 0
        rows.append(
            (
                str(subject.folder.path),
                subject.method,
                str(subject.run.config["train"]["seed"]),
                f"{step:,}",
                short(step * subject.run.tokens_per_step),
                short(parameters["total"]),
                short(parameters["active"]),
            )
        )
    return f"<section><h2>Runs</h2>{table(head, rows)}</section>"

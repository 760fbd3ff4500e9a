"""compare.html: the figures of a comparison and its tables, whose columns can be sorted by clicking."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median

from ..analysis.figures.axes import Strokes, draw_key, rows_of
from ..analysis.figures.learning import draw_losses
from ..analysis.figures.style import GRID, INK, METHODS, MUTED, WIDE, Figure
from ..analysis.methods import options
from ..analysis.page import exhibit, exhibits, links, options_that_differ, page, save_figure, section, table, text
from ..analysis.plain import Data
from ..analysis.records import read_run
from ..analysis.results import Result, by_method, curves
from ..files import replace_file
from .findings import Findings
from .judgement import Judged
from .judgement import shown as interval
from .paired import Verdict

BEYOND = 3
"""The limit of the axis of differences, in multiples of the median distance from 0 to the far end of an interval."""
VERDICTS: dict[Verdict, str] = {"lower": METHODS[3], "equivalent": INK, "open": MUTED, "higher": METHODS[6]}
"""The colours of verdicts."""


def draw(findings: Findings, folder: Path, labels: Mapping[str, str] | None = None) -> list[str]:
    """Write the page and its main figures as files, and return the names of the figures.

    labels: names of the methods in the figure of losses. Raises ValueError if matplotlib is missing.
    """
    methods = by_tokens(findings.results)["methods"]
    for entry in methods:
        entry["method"] = (labels or {}).get(entry["method"], entry["method"])
    judged = findings.judged
    figures = {"loss_by_method": partial(draw_losses, {"methods": methods})}
    if any(row.difference is not None for row in judged):
        figures["differences"] = partial(draw_differences, judged, findings.baseline, findings.margin)
    for name, figure in figures.items():
        save_figure(figure, folder / name)
    replace_file(folder / "compare.html", comparison_page(findings, folder).encode())
    return list(figures)


def comparison_page(findings: Findings, folder: Path) -> str:
    """Return the page for this folder, with links to the runs' reports. Raises ValueError if matplotlib is missing."""
    results, judged, baseline, margin = findings.results, findings.judged, findings.baseline, findings.margin
    band = f"Last validation loss minus that of {baseline}, with 95 % intervals; the band is ±{margin:g}."
    shown = []
    if any(row.difference is not None for row in judged):
        shown.append(exhibit("Differences", band, partial(draw_differences, judged, baseline, margin)))
    shown.append(exhibit("Loss by tokens", "Means over seeds.", partial(draw_losses, by_tokens(results))))
    if any(row.seconds is not None for row in judged):
        by_time = partial(draw_losses, by_seconds(results), "seconds of training")
        shown.append(exhibit("Loss by seconds", "Means over seeds.", by_time))
    titles = ("Losses and loads", f"Against {baseline}", "Loads")
    body = [f"<header><h1>Comparison</h1>{text(findings.headline)}</header>"]
    for title, (head, lines, note) in zip(titles, findings.tables(str), strict=True):
        body.append(section(title, table(head, lines, title), text(note, muted=True) if note else ""))
    reports = {f"{run.method}, seed {run.seed}": run.run.report for run in findings.runs}
    reports["Analysis"] = folder / "analysis" / "report.html"
    differing = options_that_differ(
        {method: options(read_run(runs[0].run)) for method, runs in by_method(findings.runs).items()}
    )
    return page("Comparison", [*body, exhibits("Figures", shown), differing, links(reports, folder)])


def by_tokens(results: Sequence[Result]) -> Data:
    """Return the mean losses over tokens, as data for a figure."""
    methods = [{"method": method, "kind": method, "points": points} for method, points in curves(results).items()]
    return {"methods": methods}


def by_seconds(results: Sequence[Result]) -> Data:
    """Return the same losses over the mean seconds at which they were measured."""
    found, runs = by_tokens(results), by_method(results)
    for entry in found["methods"]:
        own = runs[entry["method"]]
        clocks = [dict(zip((tokens for tokens, _ in run.curve), run.clock, strict=True)) for run in own]
        entry["points"] = [(fmean(clock[tokens] for clock in clocks), loss) for tokens, loss in entry["points"]]
    return found


def draw_differences(judged: Sequence[Judged], baseline: str, margin: float) -> Figure:
    """Draw each method's mean difference from the baseline with its 95 % interval, best first, and the margin.

    Colours show verdicts. An outlier does not determine the scale: an interval that extends beyond an edge ends in an
    arrow there, and a mean beyond it is printed there as a number.
    """
    rows = [(row.method, row.difference) for row in judged if row.difference is not None]
    rows.sort(key=lambda row: row[1].mean)
    given = {difference.verdict for _, difference in rows}
    key: Strokes = {verdict: {"color": colour} for verdict, colour in VERDICTS.items() if verdict in given}
    figure, axes = rows_of(WIDE, [method for method, _ in rows])
    draw_key(figure, key)
    axes.axvspan(-margin, margin, color=GRID, linewidth=0)
    axes.axvline(0, color=INK, linewidth=0.7)
    reaches = [max(map(abs, filter(None, (row.mean, row.low, row.high))), default=0.0) for _, row in rows]
    edge = 1.05 * max(margin, min(max(reaches), BEYOND * median(reaches)))
    axes.set_xlim(-edge, edge)
    for place, (_, difference) in enumerate(rows):
        colour = VERDICTS[difference.verdict]
        if difference.low is not None and difference.high is not None:
            axes.plot([difference.low, difference.high], [place, place], color=colour)
            for at, arrow, goes_on in ((-edge, "<", difference.low < -edge), (edge, ">", difference.high > edge)):
                if goes_on and (abs(difference.mean) <= edge or at * difference.mean < 0):
                    axes.plot([at], [place], arrow, markersize=5, color=colour, clip_on=False)
        if abs(difference.mean) <= edge:
            axes.plot([difference.mean], [place], marker="o", markersize=4, color=colour)
            continue
        side = math.copysign(edge, difference.mean)
        align = "right" if side > 0 else "left"
        number = axes.text(side, place, interval(difference), ha=align, va="center", color=colour)
        number.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
    axes.set_xlabel(f"validation loss minus {baseline}'s (nats per token)", loc="right")
    axes.locator_params(axis="x", nbins=6)  # more labels such as "−0.06" would touch
    return figure

"""Writes compare.html, which shows the figures of a comparison and its tables, sortable by column."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, mean, median

from ..analysis.figures.learning import draw_losses
from ..analysis.figures.plot import Strokes, draw_key, rows_of
from ..analysis.figures.style import GRID, INK, METHODS, MUTED, WIDE, Figure
from ..analysis.page import exhibit, exhibits, links, options_that_differ, page, save_figure, section, table, text
from ..analysis.plain import Data
from ..analysis.records import Result
from ..analysis.results import by_method, over_seeds
from ..files import replace_file
from .judgement import Findings, Judged
from .judgement import shown as interval
from .paired import Verdict

BEYOND = 3
"""The limit of the axis of differences, in multiples of the median distance from 0 to the far end of an interval."""
VERDICTS: dict[Verdict, str] = {"lower": METHODS[3], "equivalent": INK, "open": MUTED, "higher": METHODS[6]}
"""The colours of verdicts."""


def write_page(findings: Findings, folder: Path) -> list[str]:
    """Write compare.html, and save its main figures as files. Return the names of these figures.

    Raises ValueError if matplotlib is missing.
    """
    results, judged, baseline, margin = findings.results, findings.judged, findings.baseline, findings.margin
    band = f"Last validation loss minus that of {baseline}, with 95 % intervals; the band is ±{margin:g}."
    shown, files = [], ["loss_by_method"]

    def add(title: str, caption: str, draw: Callable[[], Figure], file: str | None = None) -> None:
        shown.append(exhibit(title, lambda: (caption, draw() if file is None else save_figure(draw, folder / file))))

    if any(row.difference is not None for row in judged):
        files.append("differences")
        add("Differences", band, partial(draw_differences, judged, baseline, margin), "differences")
    add("Loss by tokens", "Means over seeds.", partial(draw_losses, curves(results)), "loss_by_method")
    if any(row.seconds is not None for row in judged):
        by_time = curves(results, by_seconds=True)
        add("Loss by seconds", "Means over seeds.", partial(draw_losses, by_time, "seconds of training"))
    titles = ("Losses and loads", f"Against {baseline}", "Loads")
    body = [f"<header><h1>Comparison</h1>{text(findings.headline)}</header>"]
    for title, (head, lines, note) in zip(titles, findings.tables(str), strict=True):
        body.append(section(title, table(head, lines, title), text(note, muted=True) if note else ""))
    ends = [options_that_differ(findings.runs), links(findings.runs, folder, Analysis=folder / "analysis/report.html")]
    content = page("Comparison", [*body, exhibits("Figures", shown), *ends])
    replace_file(folder / "compare.html", content.encode())
    return files


def curves(results: Sequence[Result], *, by_seconds: bool = False) -> Data:
    """Return each method's mean loss over tokens, or mean seconds, wherever all of its seeds were validated."""
    methods = []
    for method, runs in by_method(results).items():
        losses = [dict(run.curve) for run in runs]
        clocks = [dict(zip(loss, run.clock, strict=True)) for loss, run in zip(losses, runs, strict=True)]
        points = [
            (
                fmean(clock[tokens] for clock in clocks) if by_seconds else tokens,
                over_seeds(mean, [loss[tokens] for loss in losses]),
            )
            for tokens in losses[0]
            if all(tokens in loss for loss in losses)
        ]
        methods.append({"method": method, "kind": method, "points": points})
    return {"methods": methods}


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

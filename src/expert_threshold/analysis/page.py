"""Self-contained HTML pages with vector figures, for light and dark themes, screens and phones."""

from __future__ import annotations

import io
import json
import os
import re
import traceback
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from ..files import replace_file
from .figures.style import NARROW, THEME, Figure, style
from .methods import options
from .plain import NotShownError, plain
from .records import Run
from .results import by_method


class Exhibit(NamedTuple):
    """A figure with its caption. If there is no figure, the caption is the reason why it is not shown."""

    title: str
    caption: str
    figure: Figure | None = None
    files: str | None = None  # name of its files next to the page, without suffix
    failed: bool = False  # whether the reason is an error


def exhibit(title: str, make: Callable[[], tuple[str, Figure]], files: str | None = None) -> Exhibit:
    """Return the caption and the figure that `make` draws with `STYLE` active, or the reason why there is none.

    An error omits only the figure where it occurs, since users need the others when a run has gone wrong. Raises
    OSError if the disk is full, and ValueError if matplotlib is missing.
    """
    with style():
        try:
            return Exhibit(title, *make(), files)
        except NotShownError as reason:
            return Exhibit(title, str(reason))
        except OSError:
            raise
        except Exception as error:
            return Exhibit(title, _describe(error), failed=True)


def _describe(error: Exception) -> str:
    """Return the error message in one line, with its type and location unless it is meant for users."""
    text = " ".join(str(error).split()).rstrip(".")
    place = traceback.extract_tb(error.__traceback__)[-1]
    if type(error) is ValueError and "expert_threshold" in place.filename:
        return text
    return f"{type(error).__name__}: {text} ({Path(place.filename).name}, line {place.lineno})"


DPI = 200  # of PNG files
HERE = Path(__file__).parent
CSS, SCRIPT = ((HERE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
COLOURS = {"page": ("#ffffff", "#14171a"), **THEME}
LIGHT, DARK = (";".join(f"--{name}:{pair[i]}" for name, pair in COLOURS.items()) for i in (0, 1))
VARIABLES = f":root {{ {LIGHT} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}\n"


def page(title: str, body: Iterable[str]) -> str:
    """Return the document. title: plain text; body: HTML."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{VARIABLES}{CSS}</style>
</head>
<body>
<main>
{"".join(body)}
</main>
<script>
{SCRIPT}</script>
</body>
</html>
"""


def section(title: str, *parts: str) -> str:
    """Return a section of the page, or an empty string if all of its parts are empty."""
    content = "\n".join(filter(None, parts))
    return f"<section><h2>{escape(title)}</h2>\n{content}</section>\n" if content else ""


def text(sentence: str, *, muted: bool = False) -> str:
    """Return a paragraph."""
    kind = ' class="muted"' if muted else ""
    return f"<p{kind}>{escape(sentence)}</p>"


def facts(entries: Iterable[tuple[str, str]]) -> str:
    """Return a list of names and their values."""
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in entries)}</dl>"


def folded(summary: str, content: str) -> str:
    """Return content that is collapsed until its summary is clicked."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def exhibits(title: str, entries: Iterable[Exhibit]) -> str:
    """Return a section of figures side by side, with errors noted, or an empty string if there are no figures."""
    figures = []
    for entry in entries:
        if entry.figure is not None:
            figures.append(_figure(f"{title} {entry.title}", entry, entry.figure))
        elif entry.failed:
            reason = f"<p>This figure failed: {escape(entry.caption)}.</p>"
            figures.append(f"<figure><h3>{escape(entry.title)}</h3>{reason}</figure>")
    return section(title, '<div class="figures">\n' + "\n".join(figures) + "\n</div>" if figures else "")


def left_out(entries: Iterable[Exhibit]) -> str:
    """Return a section that lists the omitted figures with reasons, or an empty string if there are none."""
    missing = [entry for entry in entries if entry.figure is None and not entry.failed]
    lines = "".join(f"<li>{escape(entry.title)}: {escape(entry.caption)}.</li>" for entry in missing)
    return section("Left out", f"<ul>{lines}</ul>" if lines else "")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], name: str = "Table") -> str:
    """Return a table that scrolls if it is too wide. A click on the heading of a column sorts the rows by it.

    name: the name of the table for screen readers.
    """
    names = "".join(f'<th scope="col"><button>{escape(label)}</button></th>' for label in head)
    lines = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}">'
        f"<table><thead><tr>{names}</tr></thead>\n<tbody>{lines}</tbody></table></div>"
    )


def options_that_differ(runs: Sequence[Run]) -> str:
    """Return a section with the options that differ between methods, or an empty string if there are none."""
    each = {method: options(same[0]) for method, same in by_method(runs).items()}
    names = dict.fromkeys(name for own in each.values() for name in own)
    rows = [[name, *(str(own.get(name, "–")) for own in each.values())] for name in names]
    title, rows = "Options that differ", [row for row in rows if len(set(row[1:])) > 1]
    return section(title, table(["option", *each], rows, title) if rows else "")


def links(runs: Sequence[Run], folder: Path, **others: Path) -> str:
    """Return links from a page in `folder` to the existing reports of the runs and to other existing pages."""
    pages = {f"{run.method}, seed {run.seed}": run.folder.report for run in runs} | others
    found = {name: os.path.relpath(path.resolve(), folder.resolve()) for name, path in pages.items() if path.is_file()}
    items = "".join(f'<a href="{quote(path)}">{escape(name)}</a>' for name, path in found.items())
    return f'<nav aria-label="Reports">{items}</nav>' if items else ""


def text_block(text: str) -> str:
    """Return preformatted text, with control characters replaced, since HTML forbids them."""
    visible = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", text)
    return f"<pre>{escape(visible)}</pre>"


def _figure(name: str, exhibit: Exhibit, figure: Figure) -> str:
    drawn = svg(figure, re.sub(r"\W+", "-", name.lower()), f"Chart: {exhibit.title}")  # the caption describes it
    layout = "wide" if figure.get_figwidth() > NARROW else ""
    files = values = ""
    if exhibit.files:
        kinds = {"png": "PNG", "svg": "SVG", "json": "data"}
        links = (f' <a href="{escape(exhibit.files)}.{kind}">{what}</a>' for kind, what in kinds.items())
        files = f' <span class="files">{"".join(links)}</span>'
    if panels := charts(figure):
        numbers = json.dumps(panels).replace("<", "\\u003c")
        script = f'<script type="application/json">{numbers}</script>'
        values = f'<details class="values"><summary>Values</summary></details>{script}'
    return (
        f'<figure class="{layout}"><h3>{escape(exhibit.title)}</h3>\n<div class="chart">{drawn}</div>\n'
        f'<figcaption>{escape(exhibit.caption)}{files} <span class="scales"></span></figcaption>{values}</figure>'
    )


def charts(figure: Figure) -> list[dict[str, Any]]:
    """Return the scales, positions and numbers of a figure's panels with named lines, for the script of the page.

    box: left, top, right and bottom edge in SVG units. scalable: True if moving the lines suffices to change the axes.
    """
    width, height = 72 * figure.get_size_inches()
    found = []
    for place, axes in enumerate(figure.axes):
        named = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
        named = [line for line in named if line.get_transform() == axes.transData and np.size(line.get_xdata())]
        if not named:
            continue
        left, bottom, right, top = axes.get_position().extents
        data = {line: np.asarray(line.get_xydata(), dtype=float) for line in named}
        below = (other.get_xlabel() for other in [axes, *reversed(figure.axes)])
        panel = {
            "axes": place,
            "title": axes.get_title(loc="left") or axes.get_ylabel(),
            "xlabel": next(filter(None, below), ""),
            "box": [left * width, (1 - top) * height, right * width, (1 - bottom) * height],
            "xlim": axes.get_xlim(),
            "ylim": axes.get_ylim(),
            "log": [axis.get_scale() == "log" for axis in (axes.xaxis, axes.yaxis)],
            "scalable": not axes.images and not axes.patches and max(map(len, data.values())) > 2,
            "lines": [{"name": str(line.get_label()), "x": xy[:, 0], "y": xy[:, 1]} for line, xy in data.items()],
        }
        found.append(plain(panel))
    return found


def save_figure(draw: Callable[[], Figure], path: Path) -> Figure:
    """Draw a figure, write it to path.png and path.svg atomically on a white background, and return it."""
    with style():
        figure = draw()
        for kind, undated in (("png", {}), ("svg", {"Date": None})):  # identical figures give identical files
            image = io.BytesIO()
            figure.savefig(image, format=kind, dpi=DPI, facecolor="white", metadata=undated)
            replace_file(path.with_name(f"{path.name}.{kind}"), image.getvalue())
        return figure


def svg(figure: Figure, prefix: str, alt: str) -> str:
    """Return a figure as an <svg> element, whose text remains text.

    prefix: a prefix that makes all ids unique on the page. alt: text for screen readers.
    """
    file = io.StringIO()
    with style():
        figure.savefig(file, format="svg")
    drawn = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", file.getvalue(), flags=re.DOTALL)
    box = re.search(r'viewBox="[^"]*"', drawn)
    assert box is not None
    inside = re.sub(r'(?:xlink:)?(\bid="|url\(#|href="#)', rf"\1{prefix}-", drawn[drawn.index(">", box.end()) + 1 :])
    shown = re.sub(r">\s*([^<]*?)\s*<", r">\1<", f">{inside}".strip())
    return f'<svg {box[0]} role="img" aria-label="{escape(alt)}"{shown}'

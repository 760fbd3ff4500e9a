"""Self-contained HTML pages with vector figures, for light and dark themes, screens and phones."""

from __future__ import annotations

import io
import re
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..files import replace_file
from .figures.style import NARROW, THEME, style
from .plain import NotShownError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Exhibit(NamedTuple):
    """A figure with its caption."""

    title: str
    sentence: str
    figure: Figure
    files: str | None = None  # the stem of its files beside the page, if any
    table: tuple[Sequence[str], Sequence[Sequence[str]]] | None = None  # head and rows, collapsed below it

    @property
    def wide(self) -> bool:
        """True if it is as wide as the page."""
        return bool(self.figure.get_figwidth() > NARROW)


class LeftOut(NamedTuple):
    """A figure that is not shown, with the reason. failed: the reason is an error."""

    title: str
    reason: str
    failed: bool = False

    @property
    def verb(self) -> str:
        return "failed" if self.failed else "left out"


def attempt(title: str, make: Callable[[], Exhibit]) -> Exhibit | LeftOut:
    """Return the figure that `make` draws with `STYLE` active, or the reason why it cannot be drawn.

    An error in one figure leaves out this figure alone: people look at the others when a run went wrong. Raises OSError
    where the disk is full, and ValueError if matplotlib is missing.
    """
    with style():
        try:
            return make()
        except NotShownError as reason:
            return LeftOut(title, str(reason))
        except OSError:
            raise
        except Exception as error:
            return LeftOut(title, _describe(error), failed=True)


def exhibit(title: str, sentence: str | Callable[[], str], draw: Callable[[], Figure]) -> Exhibit | LeftOut:
    """Draw a figure as `attempt` does."""
    return attempt(title, lambda: Exhibit(title, sentence if isinstance(sentence, str) else sentence(), draw()))


def _describe(error: Exception) -> str:
    """Return the message in one line; of an error that is not meant for users, also its type and place."""
    text = " ".join(str(error).split()).rstrip(".")
    place = traceback.extract_tb(error.__traceback__)[-1]
    return (
        text
        if type(error) is ValueError and "expert_threshold" in place.filename
        else (f"{type(error).__name__}: {text} ({Path(place.filename).name}, line {place.lineno})")
    )


DPI = 200  # of PNG

CSS = """
*, ::before, ::after { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); font: 1rem/1.5 system-ui, sans-serif }
main { max-width: 58rem; margin: auto; padding: 2rem 1rem 4rem }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; text-wrap: balance }
h2 { font-size: 1.25rem; margin: 3rem 0 .5rem }
h3 { font-size: 1rem; margin: 0 0 .5rem }
p { margin: .5rem 0; max-width: 44rem }
.muted, figcaption, dt, th { color: var(--muted) }
.numbers { display: flex; flex-wrap: wrap; gap: .75rem 2.25rem; margin: 1.5rem 0; padding: 0; list-style: none }
.numbers li { color: var(--muted); font-size: .875rem }
.numbers b { display: block; font-size: 1.6rem; line-height: 1.2; font-weight: 600; color: var(--ink) }
.numbers li:first-child b { color: var(--accent) }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.25rem; margin: 0; font-size: .9375rem }
dd { margin: 0; overflow-wrap: anywhere }
.figures { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 2.25rem 2rem; margin-top: 1rem }
figure { margin: 0; min-width: 0 }
figure.wide { grid-column: 1 / -1 }
.files { white-space: nowrap }
a { color: var(--accent) }
figcaption { font-size: .875rem; margin-top: .25rem; max-width: 44rem }
.chart { overflow-x: auto }
svg { display: block; width: 100%; min-width: 22rem; height: auto; overflow: visible;
  font-variant-numeric: tabular-nums }
.wide svg { min-width: 46rem }
svg * { stroke-linejoin: round; stroke-linecap: butt }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums }
th, td { padding: .3rem 1.25rem .3rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid) }
th { font-weight: 500 }
th:first-child, td:first-child { text-align: left }
th button { all: unset; cursor: pointer } th button:focus-visible { outline: 2px solid var(--accent) }
th[aria-sort=ascending] button::after { content: " ↑" } th[aria-sort=descending] button::after { content: " ↓" }
pre { margin: .5rem 0; padding: 1rem; border: 1px solid var(--grid); border-radius: .375rem; font-size: .8125rem;
  line-height: 1.45; white-space: pre-wrap; overflow-wrap: anywhere }
summary { cursor: pointer; padding: .25rem 0 }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px }
@media (max-width: 50rem) {
  main { padding-top: 1.25rem }
  .figures { grid-template-columns: minmax(0, 1fr) }
  dl { font-size: .875rem; column-gap: .75rem }
}
@media print { .figures { break-inside: avoid } }
"""
COLOURS = {"page": ("#ffffff", "#14171a"), **THEME}
NAMES = {light: name for name, (light, _) in COLOURS.items()}
LIGHT, DARK = (";".join(f"--{name}:{pair[i]}" for name, pair in COLOURS.items()) for i in (0, 1))
VARIABLES = f":root {{ {LIGHT} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}"


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
</body>
</html>
"""


def exhibits(section: str, entries: Iterable[Exhibit | LeftOut]) -> str:
    """Return a section of figures side by side, with a line for each one that failed; empty if there are none."""
    shown = [entry for entry in entries if isinstance(entry, Exhibit) or entry.failed]
    if not shown:
        return ""
    figures = "\n".join(
        _figure(f"{section} {entry.title}", entry)
        if isinstance(entry, Exhibit)
        else f"<figure><h3>{escape(entry.title)}</h3><p>This figure failed: {escape(entry.reason)}.</p></figure>"
        for entry in shown
    )
    return f'<section><h2>{escape(section)}</h2>\n<div class="figures">\n{figures}\n</div></section>'


def left_out(entries: Iterable[Exhibit | LeftOut]) -> str:
    """Return the section of omitted figures with reasons, empty if there are none."""
    missing = [entry for entry in entries if isinstance(entry, LeftOut) and not entry.failed]
    lines = "".join(f"<li>{escape(entry.title)}: {escape(entry.reason)}.</li>" for entry in missing)
    return f"<section><h2>Left out</h2><ul>{lines}</ul></section>" if lines else ""


SORT = """
for (const head of document.querySelectorAll("th button")) head.onclick = () => {
  const column = head.closest("th"), index = column.cellIndex, body = column.closest("table").tBodies[0];
  const up = column.ariaSort !== "ascending";
  for (const other of column.parentNode.cells) other.ariaSort = "none";
  column.ariaSort = up ? "ascending" : "descending";
  const units = { k: 1e3, M: 1e6, B: 1e9, T: 1e12 };
  const key = row => {
    const text = row.cells[index].textContent;
    const found = text.replace(/,/g, "").replace("−", "-").match(/[-+]?[0-9.]+([kMBT]?)/);
    return index && found ? parseFloat(found[0]) * (units[found[1]] ?? 1) : text;
  };
  const rows = [...body.rows].sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
    return (x < y ? -1 : x > y ? 1 : 0) * (up ? 1 : -1);
  });
  body.append(...rows);
};
"""
"""Sorts the rows of a sortable table by the column whose head is clicked; cells without a number come last."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, sortable: bool = False) -> str:
    """Return a table that scrolls if it is too wide. sortable: on a page with the script `SORT`."""
    labels = (f"<button>{escape(name)}</button>" if sortable else escape(name) for name in head)
    names = "".join(f'<th scope="col">{label}</th>' for label in labels)
    lines = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Table"><table><thead><tr>{names}</tr></thead>\n'
        f"<tbody>{lines}</tbody></table></div>"
    )


def text_block(text: str) -> str:
    """Return preformatted text; control characters, which HTML forbids, are replaced."""
    visible = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", text)
    return f"<pre>{escape(visible)}</pre>"


def _figure(name: str, exhibit: Exhibit) -> str:
    prefix = re.sub(r"\W+", "-", name.lower())
    alt = f"Chart: {exhibit.title}"  # the caption describes it
    return (
        f"<figure{' class=wide' if exhibit.wide else ''}><h3>{escape(exhibit.title)}</h3>\n"
        + f'<div class="chart">{svg(exhibit.figure, prefix, alt)}</div>'
        + f"\n<figcaption>{escape(exhibit.sentence)}{_links(exhibit.files)}</figcaption>"
        + (f"<details><summary>As a table</summary>{table(*exhibit.table)}</details>" if exhibit.table else "")
        + "</figure>"
    )


def _links(files: str | None) -> str:
    kinds = {"png": "PNG", "svg": "SVG", "json": "data"}
    links = "".join(f' <a href="{escape(files)}.{kind}">{what}</a>' for kind, what in kinds.items()) if files else ""
    return f' <span class="files">{links}</span>' if files else ""


def save_figure(draw: Callable[[], Figure], path: Path) -> Figure:
    """Draw a figure, write path.png and path.svg atomically, on white, and return it."""
    with style():
        figure = draw()
        for kind in ("png", "svg"):
            image = io.BytesIO()
            figure.savefig(image, format=kind, dpi=DPI, facecolor="white", metadata=_UNDATED[kind])
            replace_file(path.with_name(f"{path.name}.{kind}"), image.getvalue())
        return figure


_UNDATED = {"png": None, "svg": {"Date": None}}  # identical figures give identical files


def svg(figure: Figure, prefix: str, alt: str) -> str:
    """Return a figure as an <svg> element: text stays text, the theme's colours become variables, ids are unique.

    prefix: of all ids, unique on the page. alt: the text for screen readers.
    """
    file = io.StringIO()
    with style():
        figure.savefig(file, format="svg")
    root = ElementTree.fromstring(file.getvalue())
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', file.getvalue()))
    for element in list(root.iter()):
        element.tag = _local(element.tag)
        element.text, element.tail = (element.text or "").strip() or None, None
        attributes = {_local(name): value for name, value in element.attrib.items()}
        element.attrib.clear()
        element.attrib.update({n: _for_page(n, v, prefix) for n, v in attributes.items() if n != "id" or v in used})
        for child in list(element):
            if _local(child.tag) in ("metadata", "style"):
                element.remove(child)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": alt}
    return ElementTree.tostring(root, encoding="unicode")


def _for_page(name: str, value: str, prefix: str) -> str:
    if name == "id":
        return f"{prefix}-{value}"
    value = re.sub(r"url\(#", f"url(#{prefix}-", value)
    if name == "href" and value.startswith("#"):
        return f"#{prefix}-{value[1:]}"
    if name == "style":
        value = re.sub(r"font: ([\d.]+px)[^;]*", r"font-size: \1", value)  # use the page's typeface
        value = re.sub(r"#[0-9a-f]{6}", lambda found: f"var(--{NAMES[found[0]]})", value)
    return value


def _local(name: str) -> str:
    """Return the name without its namespace, which HTML implies."""
    return name.rpartition("}")[2]

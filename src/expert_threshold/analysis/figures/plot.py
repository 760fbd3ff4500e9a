"""Panels, legends, axes and colour scales for matplotlib, whose constrained layout makes room for all text.

Lengths are in inches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from ..plain import Data, array
from ..records import Points, finite
from ..sentences import pool_size
from .style import INK, MUTED, SMALL, WARMUP, Axes, Figure, expert_colours, layer_colours, strokes

if TYPE_CHECKING:
    from matplotlib.cm import ScalarMappable
    from matplotlib.lines import Line2D

PANEL, GAP = 1.6, 0.25  # the minimum width of a panel, and the space between panels
CHARACTER, LINE = 0.078, 0.16  # the size of text
BESIDE = 0.4  # the maximum share of a figure's width for names next to the axes
LONGEST, ALL = 240, 24_000  # points per line or columns per heatmap, and points in total; more would not be visible
HEAT, ORANGE, GREY = (0.12, 0.44, 0.76), (0.87, 0.43, 0.08), (0.5, 0.5, 0.5)

Strokes = Mapping[str, Mapping[str, Any]]
"""matplotlib's options of a line or marker, by name."""


def smooth(points: Points) -> Points:
    """Return moving means over a twentieth of the points, or fewer near the ends. Missing numbers are omitted."""
    numbers = finite(points)
    reach = len(numbers) // 40
    windows = (numbers[max(i - reach, 0) : i + reach + 1] for i in range(len(numbers)))
    return [(x, sum(y for _, y in near) / len(near)) for (x, _), near in zip(numbers, windows, strict=True)]


def thin(steps: np.ndarray, values: np.ndarray, lines: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Select evenly spaced records, including the first and the last. The more `lines`, the fewer records per line."""
    count = min(len(steps), LONGEST, max(ALL // lines, 2))
    chosen = np.linspace(0, len(steps) - 1, count).round().astype(int)
    return steps[chosen], values[chosen]


def single(width: float, height: float = 1.6, title: str = "", x: str = "", counts: str = "") -> tuple[Figure, Axes]:
    """Create one panel; see `panels`."""
    figure, (axes,) = panels(width, [title], height, x, counts=counts)
    return figure, axes


def panels(
    width: float,
    titles: Sequence[str],
    height: float,
    x: str = "",
    y: str = "",
    *,
    key: Strokes | None = None,
    colours: Sequence[str] = (),
    least: float = PANEL,
    columns: int | None = None,
    share: bool = True,
    counts: str = "",
) -> tuple[Figure, list[Axes]]:
    """Create a panel for each title, in rows.

    height: approximate height of each panel's axes. x, y: labels, with units, of the bottom and the leftmost panels.
    key: see `draw_key`. colours: the titles' colours. least: minimum width of a panel, unless `columns` is given.
    share: share axes between panels; otherwise every panel has the label x. counts: a label x of counts, which are
    written as 20k.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    gap = GAP if share else GAP + 0.35
    least = max([least, *(len(line) * CHARACTER for title in titles for line in title.split("\n"))])
    columns = columns or max(min(len(titles), int((width - 0.6) / (least + gap))), 1)
    rows = -(-len(titles) // columns)
    columns = -(-len(titles) // rows)  # balance the rows
    above = LINE * max(title.count("\n") + bool(title) for title in titles)
    figure = Figure((width, rows * (height + above + (0.15 if share else 0.4)) + 0.45), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=share, sharey=share, squeeze=False).ravel().tolist()
    every, unused = grid[: len(titles)], grid[len(titles) :]
    for axes in unused:
        axes.remove()
    for place, (axes, title) in enumerate(zip(every, titles, strict=True)):
        axes.set_title(title, color=colours[place] if colours else MUTED)
        if counts:
            whole_ticks(axes.xaxis)
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if not share or place >= len(every) - columns:
            axes.tick_params(labelbottom=True)
            axes.set_xlabel(counts or x, loc="right")
        if place % columns == 0:
            axes.set_ylabel(y)
    if key:
        draw_key(figure, key)
    return figure, every


def rows_of(width: float, names: Sequence[str]) -> tuple[Figure, Axes]:
    """Create one panel with a row for each name. Names are to the left of their rows and wrap if they are long."""
    lines = [fill(name, int(BESIDE * width / CHARACTER)) for name in names]
    room = max(0.24, LINE * (1 + max(text.count("\n") for text in lines)))
    figure, axes = single(width, room * len(names) + 0.2)
    axes.set_yticks(range(len(names)), lines, color=INK)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(False)
    axes.grid(axis="x")
    return figure, axes


def method_panels(
    width: float, methods: Sequence[Data], height: float, x: str, y: str, **options: Any
) -> tuple[Figure, list[tuple[Axes, Data, Mapping[str, Any]]]]:
    """Create a panel for each method, titled in its colour, and return each with its method and stroke.

    x, y, options: as in `panels`.
    """
    drawn = strokes(methods)
    colours = [stroke["color"] for stroke in drawn.values()]
    figure, every = panels(width, list(drawn), height, x, y, colours=colours, **options)
    return figure, list(zip(every, methods, drawn.values(), strict=True))


def draw_key(figure: Figure, key: Strokes) -> None:
    """Draw a legend above the panels: samples of lines with names, wrapped if long. The figure grows to fit it."""
    from matplotlib.lines import Line2D

    width = figure.get_figwidth()
    names = [fill(name, int((width - 0.7) / CHARACTER)) for name in key]
    widths = np.array([0.5 + CHARACTER * max(map(len, name.split("\n"))) for name in names])
    shapes = (np.array_split(widths, columns) for columns in range(len(names), 0, -1))
    shape = next(shape for shape in shapes if len(shape) == 1 or sum(map(max, shape)) < width)
    lines = len(shape[0]) * max(1 + name.count("\n") for name in names)
    figure.set_figheight(figure.get_figheight() + lines * LINE + 0.1)
    samples = [Line2D([], [], **stroke) for stroke in key.values()]
    figure.legend(samples, names, loc="outside upper left", ncols=len(shape), labelcolor=INK)


def name_lines(axes: Axes, lines: Sequence[Line2D], number: str = "") -> None:
    """Write the name of each line next to its end, in the line's colour. number: format of the last values."""
    figure = figure_of(axes)
    ends = {line: values[-1] for line in lines if len(values := (y := array(line.get_ydata()))[np.isfinite(y)])}
    found = sorted(ends, key=lambda line: -ends[line])
    characters = int((BESIDE * figure.get_figwidth() - 0.4) / CHARACTER)
    last = f"  {number}" if number else ""
    names = [fill(str(line.get_label()), characters) + last.format(ends[line]) for line in found]
    if found:
        axes.legend(found, names, loc="upper left", bbox_to_anchor=(1, 1), labelcolor="linecolor")
        tall = LINE * len("\n".join(names).split("\n")) + 0.8
        figure.set_figheight(max(figure.get_figheight(), tall))


def figure_of(axes: Axes) -> Figure:
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure


def line(axes: Axes, points: Points | np.ndarray, colour: str, **options: Any) -> Line2D:
    """Draw a line through points (x, y)."""
    (drawn,) = axes.plot(*array(points).reshape(-1, 2).T, color=colour, **(marker(len(points)) | options))
    return drawn


def marker(points: int) -> dict[str, Any]:
    """Return options that make a single point visible, since a line through it would not be."""
    return {"marker": "o"} if points == 1 else {}


def named_lines(axes: Axes, lines: Mapping[str, Points], colours: Sequence[str] = (), number: str = "") -> None:
    """Draw lines, by default in the layers' colours, and label them, or only the first and last of many."""
    drawn = []
    for (name, points), colour in zip(lines.items(), colours or layer_colours(len(lines)), strict=False):
        steps, values = np.array(points).T
        steps, values = thin(steps, values, len(lines))
        drawn += axes.plot(steps, values, color=colour, linewidth=1.3, label=name, **marker(len(steps)))
    name_lines(axes, drawn if len(drawn) <= 6 else drawn[:: len(drawn) - 1], number)


def expert_lines(axes: Axes, steps: np.ndarray, values: np.ndarray) -> None:
    """Draw values (steps, experts) as a line over steps for each expert, in the colours of `expert_key`."""
    for expert, (points, colour) in enumerate(zip(values.T, expert_colours(values.shape[1]), strict=True)):
        axes.plot(steps, points, color=colour, linewidth=1, label=f"expert {expert}", **marker(len(steps)))


def heat(axes: Axes, values: np.ndarray, low: float = 0, high: float = 1) -> ScalarMappable:
    """Draw cells (rows, columns), clear at `low` and blue at `high`, and return them for `colour_scale`."""
    return cells(axes, values, [(0, (*HEAT, 0)), (1, (*HEAT, 1))], low, high)


def deviations(axes: Axes, ratio: np.ndarray, **options: Any) -> ScalarMappable:
    """Draw ratios to a target as cells: clear at 1, blue at 2 and above, orange at ½ and below, grey if missing."""
    colours = [(0, (*ORANGE, 1)), (0.5, (*ORANGE, 0)), (0.5, (*HEAT, 0)), (1, (*HEAT, 1))]
    with np.errstate(divide="ignore"):
        return cells(axes, np.log2(ratio), colours, -1, 1, **options)


def cells(axes: Axes, values: np.ndarray, colours: Any, low: float, high: float, **options: Any) -> ScalarMappable:
    """Draw values (rows, columns) as framed cells, since some may be clear. Missing values are grey.

    colours: pairs of a place between `low` (0) and `high` (1) and its RGBA.
    """
    from matplotlib.colors import LinearSegmentedColormap

    axes.grid(False)
    axes.spines[:].set_visible(True)
    whole_ticks(axes.xaxis)
    whole_ticks(axes.yaxis)
    scale = LinearSegmentedColormap.from_list("", colours).with_extremes(bad=(*GREY, 0.3))
    return axes.imshow(values, scale, vmin=low, vmax=high, aspect="auto", interpolation="none", **options)


def colour_scale(every: Sequence[Axes], colours: ScalarMappable, ticks: Mapping[float, str]) -> Axes:
    """Draw the colour scale to the right of the panels. ticks: labels, keyed by value."""
    bar = figure_of(every[0]).colorbar(colours, ax=list(every), aspect=25, fraction=0.04, pad=0.01)
    bar.outline.set_visible(False)
    bar.set_ticks(list(ticks), labels=list(ticks.values()))
    return bar.ax


def expert_key(every: Sequence[Axes], count: int) -> None:
    """Draw the key to the experts' colours to the right of the panels."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    colours = ScalarMappable(Normalize(-0.5, count - 0.5), ListedColormap(expert_colours(count)))
    ticks = sorted({0, (count - 1) // 2, count - 1})
    colour_scale(every, colours, {tick: f"expert {tick}" for tick in ticks}).invert_yaxis()


def whole_ticks(axis: Any) -> None:
    """Put ticks on an axis at as many whole numbers as fit."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))


def log_ticks(axis: Any, most: int = 8) -> None:
    """Label a logarithmic axis with plain numbers: powers of ten, or more densely if it spans few of them."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

    low, high = axis.get_view_interval()
    digits = (1, 2, 5) if high < 30 * low else (1,)
    axis.set_major_locator(MaxNLocator(5) if high < 3 * low else LogLocator(subs=digits, numticks=most))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))


def log2_axis(axes: Axes, ticks: Sequence[int], label: Callable[[int], str] = pool_size) -> None:
    """Make the x axis logarithmic, with ticks at these numbers alone."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, map(label, ticks))
    axes.set_xticks([], minor=True)


def ratio_axis(axes: Axes) -> None:
    """Show ratios from 1 to the largest on a logarithmic y axis, so that outliers leave room for other values."""
    most = max(axes.dataLim.y1, 1.1)
    axes.set_yscale("log")
    axes.set_ylim(most**-0.04, most**1.06)
    log_ticks(axes.yaxis)


def mark_warmup(axes: Axes, steps: int, labelled: bool = True) -> None:
    """Draw a line at the end of warmup if it is in view."""
    low, high = axes.get_xlim()
    if steps > 0 and low < steps < high:
        axes.axvline(steps, **WARMUP)
        if labelled:
            options: dict[str, Any] = {"color": MUTED, "va": "top", "fontsize": SMALL, "gid": "leader"}
            axes.annotate(" warmup ends", (steps, 1), xycoords=("data", "axes fraction"), **options)

"""Panels, legends and labels. Lengths are in inches; matplotlib's constrained layout gives every text its room."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..plain import array
from ..records import Points, finite
from ..sentences import SUPERSCRIPTS
from .style import INK, MUTED, SMALL, WARMUP, expert_colours, layer_colours, strokes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL, GAP = 1.6, 0.25  # the least width of a panel, and what lies between two
CHARACTER, LINE = 0.078, 0.16  # the size of text
BESIDE = 0.4  # the largest share of a figure's width for names at line ends
LONGEST, ALL = 240, 24_000  # points per line or columns per heatmap, and points in all; more are indistinguishable
HEAT = (0.12, 0.44, 0.76)

Strokes = Mapping[str, Mapping[str, Any]]
"""Name -> matplotlib's options of a line or marker."""


def smooth(points: Points) -> Points:
    """Return moving means over a twentieth of the points, fewer at the ends; missing numbers are omitted."""
    numbers = finite(points)
    reach = len(numbers) // 40
    windows = (numbers[max(i - reach, 0) : i + reach + 1] for i in range(len(numbers)))
    return [(x, sum(y for _, y in near) / len(near)) for (x, _), near in zip(numbers, windows, strict=True)]


def thin(steps: np.ndarray, values: np.ndarray, lines: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Select records evenly, first and last included; fewer for each of many `lines`."""
    count = min(len(steps), LONGEST, max(ALL // lines, 2))
    chosen = np.linspace(0, len(steps) - 1, count).round().astype(int)
    return steps[chosen], values[chosen]


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Move the ascending `wanted` places as little as possible so that they lie in [0, 1], at least `gap` apart.

    Each place less `gap` for every place before it must ascend: an isotonic regression, then clipped to the range.
    """
    blocks: list[tuple[float, int]] = []  # mean and length
    for index, place in enumerate(wanted):
        mean, length = place - index * gap, 1
        while blocks and blocks[-1][0] > mean:
            before, count = blocks.pop()
            mean, length = (before * count + mean * length) / (count + length), length + count
        blocks.append((mean, length))
    top = max(1 - (len(wanted) - 1) * gap, 0)
    fitted = [min(max(mean, 0), top) for mean, length in blocks for _ in range(length)]
    return [place + index * gap for index, place in enumerate(fitted)]


def single(width: float, height: float = 1.6, title: str = "") -> tuple[Figure, Axes]:
    """Create one panel. height: of the axes, about."""
    figure, (axes,) = panels(width, [title], height)
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
) -> tuple[Figure, list[Axes]]:
    """Create a panel for each title, in rows. height: of each panel's axes, about; colours: of the titles.

    x, y: labels, with units, of the lowest and of the leftmost panels. key: see `draw_key`. least: the panels' least
    width, unless `columns` is given. share: panels share axes.
    """
    from matplotlib.figure import Figure

    texts = [line for title in titles for line in title.split("\n")]
    gap = GAP if share else GAP + 0.35
    least = max([least, *(len(text) * CHARACTER for text in texts)])
    columns = columns or max(min(len(titles), int((width - 0.6) / (least + gap))), 1)
    rows = -(-len(titles) // columns)
    columns = -(-len(titles) // rows)  # balance the rows
    above = LINE * max(title.count("\n") + bool(title) for title in titles)
    figure = Figure((width, rows * (height + above + (0.15 if share else 0.4)) + 0.45), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=share, sharey=share, squeeze=False)
    for axes in grid.flat[len(titles) :]:
        axes.remove()
    every = list(grid.flat[: len(titles)])
    for place, (axes, title) in enumerate(zip(every, titles, strict=True)):
        axes.set_title(title, color=colours[place] if colours else MUTED)
        if place >= len(every) - columns:
            axes.tick_params(labelbottom=True)
            axes.set_xlabel(x, loc="right")
        if place % columns == 0:
            axes.set_ylabel(y)
    if key:
        draw_key(figure, key)
    return figure, every


def rows_of(width: float, names: Sequence[str], title: str = "") -> tuple[Figure, Axes]:
    """Create one panel with a row for each name, which stands left of it, wrapped if it is long."""
    lines = [fill(name, int(BESIDE * width / CHARACTER)) for name in names]
    room = max(0.24, LINE * (1 + max(text.count("\n") for text in lines)))
    figure, axes = single(width, room * len(names) + 0.2, title)
    axes.set_yticks(range(len(names)), lines, color=INK)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(False)
    axes.grid(axis="x")
    return figure, axes


def method_strokes(methods: Sequence[Mapping[str, Any]]) -> Strokes:
    """Return the stroke of each method under its name."""
    return dict(zip((entry["method"] for entry in methods), strokes(methods), strict=True))


def method_panels(
    width: float, methods: Sequence[Mapping[str, Any]], height: float, x: str, y: str, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Create a panel for each method, with its name in its colour above. x, y, options: as in `panels`."""
    colours = [stroke["color"] for stroke in strokes(methods)]
    return panels(width, [entry["method"] for entry in methods], height, x, y, colours=colours, **options)


def draw_key(figure: Figure, key: Strokes) -> None:
    """Draw a legend above the panels, for which the figure grows: names, wrapped if long, beside samples of lines."""
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


def line(axes: Axes, points: Points, colour: str, **options: Any) -> None:
    options = marker(len(points)) | options
    axes.plot([x for x, _ in points], [y for _, y in points], color=colour, **options)


def marker(points: int) -> dict[str, Any]:
    """Return options that make a single point visible, which a line is not."""
    return {"marker": "o"} if points == 1 else {}


def layer_lines(axes: Axes, values: Mapping[int, Points], scale: Callable[[Axes], None] | None = None) -> None:
    """Draw a line per layer, named at its end; of many, first and last. scale: sets the y axis; None is from 0."""
    labels = {}
    for (layer, points), colour in zip(values.items(), layer_colours(len(values)), strict=True):
        steps, thinned = np.array(points).T
        steps, thinned = thin(steps, thinned, len(values))
        axes.plot(steps, thinned, color=colour, linewidth=1.3, label=f"layer {layer}", **marker(len(steps)))
        if len(values) <= 6 or layer in (min(values), max(values)):
            labels[f"layer {layer}"] = points, colour
    if scale is None:
        top = axes.get_ylim()[1]
        axes.set_ylim(-0.03 * top, top)
    else:
        scale(axes)
    label_ends(axes, labels)


def expert_lines(axes: Axes, steps: np.ndarray, values: np.ndarray) -> None:
    """Draw a line over steps for each expert of values (steps, experts), in the colours of `expert_key`."""
    for expert, (points, colour) in enumerate(zip(values.T, expert_colours(values.shape[1]), strict=True)):
        axes.plot(steps, points, color=colour, linewidth=1, label=f"expert {expert}", **marker(len(steps)))


def label_ends(axes: Axes, labels: Mapping[str, tuple[Points, str]]) -> None:
    """Name each line beside the axes, in its colour and as near its end as the others allow; fixes the y limits.

    labels: text, with a format field for the line's last number if wanted -> points and colour.
    """
    ends = [
        (*numbers[-1], text.format(numbers[-1][1]), colour)
        for text, (points, colour) in labels.items()
        if (numbers := finite(points))
    ]
    axes.set_ylim(axes.get_ylim())
    ends.sort(key=lambda end: end[1])
    to_axes = axes.transData + axes.transAxes.inverted()  # for any scale
    wanted = [float(to_axes.transform((x, y))[1]) for x, y, _, _ in ends]
    width, height = size_of(axes)
    for (x, y, text, colour), place in zip(ends, spread(wanted, 1.1 * LINE / height), strict=True):
        axes.annotate(
            text, (x, y), (1 + 0.15 / width, place), textcoords="axes fraction", color=colour, va="center",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkB": 3, "relpos": (0, 0.5),
                        "gid": "leader"},
        )  # fmt: skip


def size_of(axes: Axes) -> tuple[float, float]:
    """Return the width and height of axes, roughly: texts have not yet taken their room."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    width, height = axes.get_position().size * figure.get_size_inches()
    return float(width), float(height)


class NamedLine(NamedTuple):
    """A method's line with its name."""

    name: str  # with the line's last number, if wanted
    points: Points
    stroke: Mapping[str, Any]


def named_lines(
    methods: Sequence[Mapping[str, Any]], points: Sequence[Points], number: str | None = None
) -> list[NamedLine]:
    """Return each method's line. number: the format of its last number after the name; None omits it."""
    found = []
    for entry, line_points, stroke in zip(methods, points, strokes(methods), strict=True):
        numbers = finite(line_points)
        last = f"  {number.format(numbers[-1][1])}" if number is not None and numbers else ""
        found.append(NamedLine(entry["method"] + last, line_points, stroke))
    return found


def name_lines(axes: Axes, lines: Sequence[NamedLine]) -> None:
    """Name each line at its end or, if names are too long, in a key at the top."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    if max((len(each.name) for each in lines), default=0) * CHARACTER + 0.2 > BESIDE * figure.get_figwidth():
        draw_key(figure, {each.name: each.stroke for each in lines})
        return
    texts = [each.name.replace("{", "{{").replace("}", "}}") for each in lines]
    label_ends(axes, {text: (each.points, each.stroke["color"]) for text, each in zip(texts, lines, strict=True)})


def step_axis(axes: Axes) -> None:
    from matplotlib.ticker import StrMethodFormatter

    label_x(axes, "step")
    whole_ticks(axes.xaxis, min(max(int(size_of(axes)[0] / (10 * CHARACTER)), 2), 5))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def tokens_axis(axes: Axes) -> None:
    from matplotlib.ticker import EngFormatter

    label_x(axes, "tokens trained on")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlim(left=0)


def label_x(axes: Axes, text: str) -> None:
    """Label the x axis unless a panel below shares it."""
    if axes.xaxis.get_tick_params()["labelbottom"]:
        axes.set_xlabel(text, loc="right")


def fanout_bars(
    every: Sequence[Axes], shares: Sequence[np.ndarray], texts: Sequence[str], colours: Sequence[str]
) -> None:
    """Draw the shares of tokens by fanout, in %, on panels with shared axes, each with a text in its corner."""
    for axes, share, text, colour in zip(every, shares, texts, colours, strict=True):
        axes.bar(np.arange(len(share)), 100 * share, width=0.82, color=colour)
        axes.annotate(text, (1, 1), xycoords="axes fraction", ha="right", va="top", color=INK)
        whole_ticks(axes.xaxis, 6)
    seen = max(int(np.flatnonzero(share >= 0.001).max(initial=0)) for share in shares)
    most = max(100 * share.max() for share in shares)
    every[0].set(xlim=(-0.6, max(seen, 3) + 0.6), ylim=(0, 1.25 * most))  # leaves room for the text


def heat(axes: Axes, shares: np.ndarray) -> None:
    """Draw cells (rows, columns) whose opacity is their share, 0 to 1; NaN is transparent."""
    cells = np.empty((*shares.shape, 4))
    cells[..., :3] = HEAT
    cells[..., 3] = np.nan_to_num(np.clip(shares, 0, 1))
    image(axes, cells)


def image(axes: Axes, colours: np.ndarray, extent: tuple[float, float, float, float] | None = None) -> None:
    """Draw cells of RGBA colours (rows, columns, 4) in a frame, since some may be clear."""
    axes.imshow(colours, extent=extent, aspect="auto", interpolation="none")
    axes.grid(False)
    axes.spines[:].set_visible(True)


def heat_key(every: Sequence[Axes], ticks: Sequence[tuple[float, str]]) -> None:
    """Draw the scale of `heat` right of the first row. ticks: shares and their labels."""
    scale = scale_axes(every)
    heat(scale, np.linspace(1, 0, 64)[:, None])
    scale.set_yticks([63 * (1 - share) for share, _ in ticks], [name for _, name in ticks])


def scale_axes(every: Sequence[Axes]) -> Axes:
    """Create the axes of a scale right of the first row of panels, without grid, with labels on its right."""
    spec = every[0].get_subplotspec()
    assert spec is not None
    last = every[min(spec.get_gridspec().ncols, len(every)) - 1]
    width, height = size_of(last)
    tall = max(1, 0.9 / height)
    scale = last.inset_axes((1 + 0.1 / width, 1 - tall, 0.1 / width, tall))
    scale.set_xticks([])
    scale.yaxis.tick_right()
    scale.grid(False)
    return scale


def by_layer(
    data: Mapping[str, Any], name: str, title: str, width: float, floor: float, scale: Callable[[Axes], object]
) -> Figure:
    """Draw `data`'s values under `name` by layer and method: lines over layers, or a row of dots for a single layer.

    floor: the least possible value. scale: sets the y axis of lines.
    """
    methods = data["methods"]
    layers = sorted({layer for entry in methods for layer in entry["layers"]})
    if len(layers) == 1:
        figure, axes = rows_of(width, [entry["method"] for entry in methods], f"{title}, layer {layers[0]}")
        for row, (entry, stroke) in enumerate(zip(methods, strokes(methods), strict=True)):
            axes.plot(entry[name], [row], linestyle="none", marker="o", markersize=6, color=stroke["color"])
        right = axes.get_xlim()[1]
        axes.set_xlim(floor - 0.02 * (right - floor), right)
        return figure
    figure, axes = single(width, 2, title)
    points = [list(zip(entry["layers"], array(entry[name]).tolist(), strict=True)) for entry in methods]
    lines = named_lines(methods, points)
    for each in lines:
        axes.plot(*array(each.points).T, **each.stroke, marker="o")
    axes.set_xlim(layers[0] - 0.5, layers[-1] + 0.5)
    axes.set_xlabel("layer", loc="right")
    axes.set_xticks(layers[:: -(-len(layers) // 8)])
    scale(axes)
    name_lines(axes, lines)
    return figure


def expert_key(every: Sequence[Axes], count: int) -> None:
    """Draw the key of experts' colours right of the first row of panels."""
    scale = scale_axes(every)
    scale.barh(range(count), 1, height=1, color=expert_colours(count))
    scale.set(xlim=(0, 1), ylim=(count - 0.5, -0.5))
    ticks = sorted({0, (count - 1) // 2, count - 1})
    scale.set_yticks(ticks, [f"expert {tick}" for tick in ticks])


def log_ticks(axis: Any, most: int = 8) -> None:
    """Label a logarithmic axis in plain numbers, 0.01, 1, 100; at 1, 2 and 5 times each if it spans few of them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axis.get_view_interval()
    few = high < 30 * low

    def number(x: float, _: int) -> str:
        power = round(math.log10(x)) if x > 0 else 0
        return f"{x:g}" if few or power > -4 else "10" + str(power).translate(SUPERSCRIPTS)

    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,), numticks=most))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(number))


def whole_ticks(axis: Any, count: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(count, integer=True, steps=[1, 2, 5, 10]))


def ratio_axis(axes: Axes, most: float) -> None:
    """Put ratios from 1 to `most` on a logarithmic y axis, so that outliers leave room for the others."""
    from matplotlib.ticker import NullLocator, StrMethodFormatter

    most = max(most, 1.1)
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(NullLocator())
    steps = (1, 2, 5) if most > 6 else (1, 1.5, 2, 3, 4, 5, 6) if most > 1.6 else (1, 1.1, 1.2, 1.3, 1.4, 1.5)
    axes.set_yticks([step * 10**power for power in range(7) for step in steps if step * 10**power <= 1.02 * most])
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_ylim(most**-0.04, most**1.06)


def mark_warmup(axes: Axes, steps: int, labelled: bool = True) -> None:
    """Draw a line where warmup ends, if it is in view."""
    low, high = axes.get_xlim()
    if steps > 0 and low < steps < high:
        axes.axvline(steps, **WARMUP)
        if labelled:
            axes.annotate(
                "warmup ends", (steps, 1), (3, -1), xycoords=("data", "axes fraction"), textcoords="offset points",
                color=MUTED, va="top", fontsize=SMALL, gid="leader",
            )  # fmt: skip

"""Panels, axes, keys and labels. Lengths are in inches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..plain import array
from ..records import Points, finite
from ..sentences import SUPERSCRIPTS
from .style import INK, MUTED, SMALL, WARMUP, expert_colours, layer_colours, strokes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Margins around the axes, equal in all figures so that they line up, and the least width of a panel.
LEFT, RIGHT, TOP, BOTTOM, PANEL = 0.45, 0.12, 0.26, 0.46, 1.6
COLUMN_GAP, ROW_GAP, LABELLED_ROW_GAP = 0.2, 0.4, 0.62
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


def single(
    width: float, height: float = 1.6, *, left: float = LEFT, top: float = TOP, key: Strokes | None = None
) -> tuple[Figure, Axes]:
    """Create one panel. height: of the axes; left, top, key: as in `panels`."""
    figure, (axes,) = panels(width, 1, height, left=left, top=top, key=key)
    return figure, axes


def panels(
    width: float,
    count: int,
    height: float,
    *,
    left: float = LEFT,
    right: float = RIGHT,
    top: float = TOP,
    least: float = PANEL,
    columns: int | None = None,
    share: bool = True,
    titles: Sequence[str] = (),
    key: Strokes | None = None,
) -> tuple[Figure, list[Axes]]:
    """Create panels in rows. height: of each panel's axes; least: their least width, unless `columns` is given.

    left, right, top: margins. share: panels share axes. titles: the texts that need room above the panels. key: drawn
    at the top of the figure, in place of the margin `top`.
    """
    from matplotlib.figure import Figure

    inside = width - left - right
    lines = max((title.count("\n") for title in titles), default=0)
    top = lines * LINE + (top if key is None else key_room(width, list(key)) + 0.28)
    least = max([least, *(len(text) * CHARACTER for title in titles for text in title.split("\n"))])
    gap, row_gap = (COLUMN_GAP, ROW_GAP) if share else (COLUMN_GAP + left - 0.1, LABELLED_ROW_GAP)
    row_gap += lines * LINE
    rows = -(-count // (columns or max(min(count, int((inside + gap) / (least + gap))), 1)))
    columns = -(-count // rows)  # balance the rows
    total = top + rows * (height + row_gap) - row_gap + BOTTOM
    figure = Figure((width, total))
    grid = figure.subplots(rows, columns, sharex=share, sharey=share, squeeze=False)
    figure.subplots_adjust(
        left=left / width,
        right=1 - right / width,
        bottom=BOTTOM / total,
        top=1 - top / total,
        wspace=gap / ((inside + gap) / columns - gap),
        hspace=row_gap / height,
    )
    for axes in grid.flat[count:]:
        axes.remove()
    draw_key(figure, key or {})
    return figure, list(grid.flat[:count])


def rows_of(
    width: float, names: Sequence[str], key: Strokes | None = None, height: float = 0.24
) -> tuple[Figure, Axes]:
    """Create one panel with a row for each name, which stands left of it, wrapped if it is long."""
    lines = [wrap(name, int(BESIDE * width / CHARACTER)) for name in names]
    left = max(len(line) for name in lines for line in name) * CHARACTER + 0.15
    room = max(height, LINE * max(map(len, lines)))
    figure, axes = single(width, room * len(names) + 0.2, left=left, key=key)
    axes.set_yticks(range(len(names)), ["\n".join(name) for name in lines], color=INK)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(False)
    axes.grid(axis="x")
    return figure, axes


def method_strokes(methods: Sequence[Mapping[str, Any]]) -> Strokes:
    """Return the stroke of each method under its name."""
    return dict(zip((entry["method"] for entry in methods), strokes(methods), strict=True))


def method_panels(
    width: float, methods: Sequence[Mapping[str, Any]], height: float, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Create a panel for each method, with its name in its colour above. options: as of `panels`."""
    titles = [entry["method"] for entry in methods]
    figure, every = panels(width, len(methods), height, left=0.62, titles=titles, **options)
    for axes, title, stroke in zip(every, titles, strokes(methods), strict=True):
        axes.set_title(title, color=stroke["color"])
    return figure, every


def outer_labels(every: Sequence[Axes], x: str, y: str) -> None:
    """Label the shared axes of panels, with units, on the lowest and leftmost panels."""
    spec = every[0].get_subplotspec()
    assert spec is not None
    columns = spec.get_gridspec().ncols
    for place, axes in enumerate(every):
        if place >= len(every) - columns:
            axes.set_xlabel(x, loc="right")
            axes.tick_params(labelbottom=True)
        if place % columns == 0:
            axes.set_ylabel(y)


def draw_key(figure: Figure, key: Strokes) -> None:
    """Draw a key at the top of the figure: names beside samples of their lines."""
    from matplotlib.lines import Line2D

    width, height = figure.get_size_inches()
    for stroke, (x, y, text) in zip(key.values(), _key_places(width, list(key))[0], strict=True):
        at = 1 - y / height
        ends = [x, x + 0.2] if stroke.get("linestyle") != "none" else [x + 0.1]  # one mark is enough
        sample = Line2D([end / width for end in ends], [at] * len(ends), transform=figure.transFigure, **stroke)
        figure.add_artist(sample)
        for row, line in enumerate(text.split("\n")):
            below = row * LINE / height
            figure.text((x + 0.26) / width, at - below, line, color=INK, va="center_baseline", fontsize=8.5)


def key_room(width: float, names: Sequence[str]) -> float:
    """Return the height that a key needs, in inches."""
    return _key_places(width, names)[1] if names else 0


def _key_places(width: float, names: Sequence[str]) -> tuple[list[tuple[float, float, str]], float]:
    """Return the place of each name in inches from the left and top, with the wrapped name, and the total height."""
    places = []
    x, y, rows = LEFT, 0.12, 1
    for name in names:
        lines = wrap(name, int((width - LEFT - 0.42) / CHARACTER)) or [""]
        room = 0.42 + max(map(len, lines)) * CHARACTER
        if x > LEFT and x + room > width:
            x, y, rows = LEFT, y + rows * LINE + 0.03, 1
        places.append((x, y, "\n".join(lines)))
        x, rows = x + room, max(rows, len(lines))
    return places, y + (rows - 1) * LINE + 0.12


def inner_labels_off(figure: Figure) -> None:
    """Keep x-axis labels on the lowest panel of each column only."""
    every = figure.axes
    spec = every[0].get_subplotspec()
    assert spec is not None
    columns = spec.get_gridspec().ncols
    for axes in every[:-columns]:
        axes.set_xlabel("")
    for axes in every[-columns:]:
        axes.tick_params(labelbottom=True)


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


def label_ends(axes: Axes, labels: Mapping[str, tuple[Points, str]]) -> None:
    """Name each line beside the axes, in its colour and as near its end as the others allow; fixes the y limits.

    labels: text, with a format field for the line's last number if wanted -> points and colour.
    """
    ends = [
        (*numbers[-1], text.format(numbers[-1][1]), colour)
        for text, (points, colour) in labels.items()
        if (numbers := finite(points))
    ]
    figure = axes.get_figure(root=True)
    assert figure is not None
    longest = max((len(text) for _, _, text, _ in ends), default=0)
    right = longest * CHARACTER + 0.2
    figure.subplots_adjust(right=1 - right / figure.get_figwidth())
    gap = 0.15 / (figure.get_figwidth() - LEFT - right)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    ends.sort(key=lambda end: end[1])
    to_axes = axes.transData + axes.transAxes.inverted()  # for any scale
    wanted = [float(to_axes.transform((x, y))[1]) for x, y, _, _ in ends]
    places = spread(wanted, LINE / (axes.get_position().height * figure.get_figheight()))
    for (x, y, text, colour), place in zip(ends, places, strict=True):
        axes.annotate(
            text, (x, y), (1 + gap, place), textcoords="axes fraction", color=colour, va="center",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkB": 3, "relpos": (0, 0.5),
                        "gid": "leader"},
        )  # fmt: skip


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
        told = f"  {number.format(numbers[-1][1])}" if number is not None and numbers else ""
        found.append(NamedLine(entry["method"] + told, line_points, stroke))
    return found


def room_for_names(width: float, lines: Sequence[NamedLine]) -> float:
    """Return the margin above a panel whose lines `name_lines` will name."""
    names = [each.name for each in lines]
    return key_room(width, names) + 0.2 if _are_long(width, names) else TOP


def name_lines(axes: Axes, lines: Sequence[NamedLine]) -> None:
    """Name each line at its end or, if names are too long, in a key at the top."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    names = [each.name for each in lines]
    if _are_long(figure.get_figwidth(), names):
        draw_key(figure, dict(zip(names, (each.stroke for each in lines), strict=True)))
        return
    texts = [name.replace("{", "{{").replace("}", "}}") for name in names]
    label_ends(axes, {text: (each.points, each.stroke["color"]) for text, each in zip(texts, lines, strict=True)})


def _are_long(width: float, names: Sequence[str]) -> bool:
    return max(map(len, names), default=0) * CHARACTER + 0.2 > BESIDE * width


def step_axis(axes: Axes) -> None:
    from matplotlib.ticker import StrMethodFormatter

    axes.set_xlabel("step", loc="right")
    figure = axes.get_figure(root=True)
    assert figure is not None
    width = axes.get_position().width * figure.get_figwidth()
    whole_ticks(axes.xaxis, min(max(int(width / (10 * CHARACTER)), 2), 5))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def tokens_axis(axes: Axes) -> None:
    from matplotlib.ticker import EngFormatter

    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("tokens trained on", loc="right")
    axes.set_xlim(left=0)


def heat(axes: Axes, shares: np.ndarray) -> None:
    """Draw cells (rows, columns) whose opacity is their share, 0 to 1; NaN is transparent."""
    cells = np.empty((*shares.shape, 4))
    cells[..., :3] = HEAT
    cells[..., 3] = np.nan_to_num(np.clip(shares, 0, 1))
    axes.imshow(cells, aspect="auto", interpolation="none")
    axes.grid(False)
    axes.spines[:].set_visible(True)


def heat_key(figure: Figure, ticks: Sequence[tuple[float, str]]) -> None:
    """Draw the scale of `heat` right of the first row. ticks: shares and their labels."""
    scale = scale_axes(figure)
    heat(scale, np.linspace(1, 0, 64)[:, None])
    scale.set_yticks([63 * (1 - share) for share, _ in ticks], [name for _, name in ticks])


def scale_axes(figure: Figure) -> Axes:
    """Create the axes of a scale right of the first row, without grid, with labels on its right."""
    row = max(figure.axes, key=lambda axes: (axes.get_position().y1, axes.get_position().x1)).get_position()
    width, height = figure.get_size_inches()
    tall = max(row.height, 0.9 / height)
    scale = figure.add_axes((row.x1 + 0.1 / width, row.y1 - tall, 0.1 / width, tall))
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
    alone = len({layer for entry in methods for layer in entry["layers"]}) == 1
    if alone:
        names = [entry["method"] for entry in methods]
        figure, axes = rows_of(width, names)
        for row, (entry, stroke) in enumerate(zip(methods, strokes(methods), strict=True)):
            axes.plot(entry[name], [row], linestyle="none", marker="o", markersize=6, color=stroke["color"])
        right = axes.get_xlim()[1]
        axes.set_xlim(floor - 0.02 * (right - floor), right)
        axes.set_title(f"{title}, layer {methods[0]['layers'][0]}")
        return figure
    points = [list(zip(entry["layers"], array(entry[name]).tolist(), strict=True)) for entry in methods]
    lines = named_lines(methods, points)
    figure, axes = single(width, 2, top=room_for_names(width, lines))
    for each in lines:
        axes.plot(*array(each.points).T, **each.stroke, marker="o")
    axes.set_title(title)
    layer_axis(axes, [layer for entry in methods for layer in entry["layers"]])
    scale(axes)
    name_lines(axes, lines)
    return figure


def expert_key(figure: Figure, count: int) -> None:
    """Draw the key of experts' colours right of the first row."""
    scale = scale_axes(figure)
    scale.barh(range(count), 1, height=1, color=expert_colours(count))
    scale.set(xlim=(0, 1), ylim=(count - 0.5, -0.5))
    ticks = sorted({0, (count - 1) // 2, count - 1})
    scale.set_yticks(ticks, [f"expert {tick}" for tick in ticks])


def plain_ticks(axis: Any, most: int = 8) -> None:
    """Label powers of ten on a logarithmic axis as plain numbers: 0.01, 1, 100."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    def number(x: float, _: int) -> str:
        power = round(math.log10(x)) if x > 0 else 0
        return f"{x:g}" if power > -4 else "10" + str(power).translate(SUPERSCRIPTS)

    axis.set_major_locator(LogLocator(numticks=most))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(number))


def few_ticks(axis: Any, low: float, high: float) -> None:
    """Label a logarithmic axis that spans few powers of ten at 1, 2 and 5 times each, from low to high."""
    from matplotlib.ticker import NullLocator

    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5) if low <= digit * 10.0**power <= high]
    axis.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axis.set_minor_locator(NullLocator())


def whole_ticks(axis: Any, count: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(count, integer=True, steps=[1, 2, 5, 10]))


def layer_axis(axes: Axes, layers: Sequence[int]) -> None:
    """Put layers on the x axis, with ticks at whole numbers only."""
    axes.set_xlim(min(layers) - 0.5, max(layers) + 0.5)
    axes.set_xlabel("layer", loc="right")
    every = sorted(set(layers))
    axes.set_xticks(every[:: -(-len(every) // 8)])


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

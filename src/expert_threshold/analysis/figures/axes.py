"""Panels, axes, and what is written beside them. Lengths are in inches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..records import Points, finite
from .style import INK, MUTED, layer_colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Margins around the axes, so that those of all figures stand in line, and the least width of one panel of many.
LEFT, RIGHT, TOP, BOTTOM, PANEL = 0.45, 0.12, 0.26, 0.46, 1.6
COLUMN_GAP, ROW_GAP, LABELLED_ROW_GAP = 0.2, 0.4, 0.62
CHARACTER, LINE = 0.078, 0.16  # the room that text takes
LONGEST, ALL = 240, 24_000  # points of a line, or columns of a heatmap, and of all lines: more could not be told apart
HEAT = (0.12, 0.44, 0.76)


def smooth(points: Points) -> Points:
    """Means over a twentieth of the points around each, fewer at the ends; points without a number are left out."""
    numbers = finite(points)
    reach = len(numbers) // 40
    windows = (numbers[max(i - reach, 0) : i + reach + 1] for i in range(len(numbers)))
    return [(x, sum(y for _, y in near) / len(near)) for (x, _), near in zip(numbers, windows, strict=True)]


def thin(steps: np.ndarray, values: np.ndarray, lines: int) -> tuple[np.ndarray, np.ndarray]:
    """As many of the records as one of so many lines can do with, evenly chosen, first and last among them."""
    count = min(len(steps), LONGEST, max(ALL // lines, 2))
    chosen = np.linspace(0, len(steps) - 1, count).round().astype(int)
    return steps[chosen], values[chosen]


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Places between 0 and 1 in the order of the ascending `wanted`, `gap` apart or more, moved as little as need be.

    What is left of a place after `gap` for each before it must ascend: an isotonic regression, then cut to the range.
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


def single(width: float, height: float = 1.6, *, left: float = LEFT, top: float = TOP) -> tuple[Figure, Axes]:
    """One panel; height: of the axes; left, top: margins."""
    figure, (axes,) = panels(width, 1, height, left=left, top=top)
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
) -> tuple[Figure, list[Axes]]:
    """Panels in rows. height: of the axes of each; least: their width, unless there are to be so many columns.

    left, right, top: margins. share: their axes are the same.
    """
    from matplotlib.figure import Figure

    inside = width - left - right
    gap, row_gap = (COLUMN_GAP, ROW_GAP) if share else (COLUMN_GAP + left - 0.1, LABELLED_ROW_GAP)
    rows = -(-count // (columns or max(min(count, int((inside + gap) / (least + gap))), 1)))
    columns = -(-count // rows)  # rows of about equal length
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
    return figure, list(grid.flat[:count])


def outer_labels(every: Sequence[Axes], x: str, y: str) -> None:
    """What the axes of panels that share them show, with units, on the lowest and the leftmost ones."""
    spec = every[0].get_subplotspec()
    assert spec is not None
    columns = spec.get_gridspec().ncols
    for place, axes in enumerate(every):
        if place >= len(every) - columns:
            axes.set_xlabel(x, loc="right")
            axes.tick_params(labelbottom=True)
        if place % columns == 0:
            axes.set_ylabel(y)


def key(figure: Figure, names: Sequence[str], drawn: Sequence[Mapping[str, Any]]) -> None:
    """Names beside pieces of their lines, in rows at the top of the figure."""
    from matplotlib.lines import Line2D

    width, height = figure.get_size_inches()
    for name, stroke, (x, y) in zip(names, drawn, _key_places(width, names), strict=True):
        at = 1 - y / height
        ends = [x, x + 0.2] if stroke.get("linestyle") != "none" else [x + 0.1]  # one mark is enough
        sample = Line2D([end / width for end in ends], [at] * len(ends), transform=figure.transFigure, **stroke)
        figure.add_artist(sample)
        figure.text((x + 0.26) / width, at, name, color=INK, va="center_baseline", fontsize=8.5)


def key_room(width: float, names: Sequence[str]) -> float:
    """The room that `key` takes at the top, in inches."""
    return _key_places(width, names)[-1][1] + 0.12


def _key_places(width: float, names: Sequence[str]) -> list[tuple[float, float]]:
    """Inches from the left and from the top."""
    places = []
    x, y = LEFT, 0.12
    for name in names:
        room = 0.42 + len(name) * CHARACTER
        if x > LEFT and x + room > width:
            x, y = LEFT, y + LINE + 0.03
        places.append((x, y))
        x += room
    return places


def inner_labels_off(figure: Figure) -> None:
    """Labels of the x axis are for the lowest panel of each column alone."""
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
    """One point alone makes no line that could be seen."""
    return {"marker": "o"} if points == 1 else {}


def layer_lines(axes: Axes, values: Mapping[int, Points], bottom: float = 0) -> None:
    """A line per layer over the least value there can be; names at the ends, of the first and the last of many."""
    labels = {}
    for (layer, points), colour in zip(values.items(), layer_colours(len(values)), strict=True):
        steps, thinned = np.array(points).T
        steps, thinned = thin(steps, thinned, len(values))
        axes.plot(steps, thinned, color=colour, linewidth=1.3, **marker(len(steps)))
        if len(values) <= 6 or layer in (min(values), max(values)):
            labels[f"layer {layer}"] = points, colour
    top = axes.get_ylim()[1]
    axes.set_ylim(bottom - 0.03 * (top - bottom), top)
    label_ends(axes, labels)


def label_ends(axes: Axes, labels: Mapping[str, tuple[Points, str]]) -> None:
    """Beside the axes, name each line in its colour as near its end as the others allow; its limits are fixed by that.

    labels: text, with the place for the line's last number if it is to be told -> points and colour.
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
    places = spread([(y - low) / (high - low) for _, y, _, _ in ends], LINE / (figure.get_figheight() - TOP - BOTTOM))
    for (x, y, text, colour), place in zip(ends, places, strict=True):
        axes.annotate(
            text, (x, y), (1 + gap, place), textcoords="axes fraction", color=colour, va="center",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkB": 3, "relpos": (0, 0.5)},
        )  # fmt: skip


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
    """Cells (rows, columns) whose opacity is their share, 0 to 1, so that any page shows through; NaN is clear."""
    cells = np.empty((*shares.shape, 4))
    cells[..., :3] = HEAT
    cells[..., 3] = np.nan_to_num(np.clip(shares, 0, 1))
    axes.imshow(cells, aspect="auto", interpolation="none")
    axes.grid(False)
    axes.spines[:].set_visible(True)


def heat_key(figure: Figure, ticks: Sequence[tuple[float, str]]) -> None:
    """The scale of `heat`, right of the first row. ticks: shares and what they are."""
    row = max(figure.axes, key=lambda axes: (axes.get_position().y1, axes.get_position().x1)).get_position()
    width, height = figure.get_size_inches()
    tall = max(row.height, 0.9 / height)
    scale = figure.add_axes((row.x1 + 0.1 / width, row.y1 - tall, 0.1 / width, tall))
    heat(scale, np.linspace(1, 0, 64)[:, None])
    scale.set_xticks([])
    scale.set_yticks([63 * (1 - share) for share, _ in ticks], [name for _, name in ticks])
    scale.yaxis.tick_right()


def plain_ticks(axis: Any, most: int = 8) -> None:
    """Powers of ten along a logarithmic axis as numbers: 0.01, 1, 100."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axis.set_major_locator(LogLocator(numticks=most))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))


def whole_ticks(axis: Any, count: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(count, integer=True, steps=[1, 2, 5, 10]))


def mark_warmup(axes: Axes, steps: int, labelled: bool = True) -> None:
    """A line where warmup ends, if that is in the picture."""
    low, high = axes.get_xlim()
    if steps > 0 and low < steps < high:
        axes.axvline(steps, color=MUTED, linewidth=0.7, linestyle=(0, (2, 2)))
        if labelled:
            axes.annotate(
                "warmup ends", (steps, 1), (3, -1), xycoords=("data", "axes fraction"), textcoords="offset points",
                color=MUTED, va="top", fontsize=8,
            )  # fmt: skip

"""Figures of dynamic computation: a panel for each method, layers dashed, their mean solid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..plain import Data, array
from .axes import key, key_room, outer_labels, panels, whole_ticks
from .style import INK, ONE_LAYER, WIDE, strokes, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEAN: dict[str, Any] = {"color": INK, "linewidth": 1.8, "marker": "o", "markersize": 2}
FANOUT = "routed experts per token"


def fanout_by_position(data: Data, width: float = WIDE) -> Figure:
    """Mean fanout over the position in the window, logarithmic."""
    from matplotlib.ticker import FixedLocator, StrMethodFormatter

    with style():
        figure, every = _by_layer(data, width, shift=1)
        last = array(data["methods"][0]["x"])[-1]
        ticks = [4.0**power for power in range(9) if 4**power <= last + 1]
        for axes in every:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_locator(FixedLocator(ticks))
            axes.xaxis.set_minor_locator(FixedLocator([]))
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
            axes.set_ylim(bottom=0)
        outer_labels(every, "position in the window", FANOUT)
    return figure


def fanout_by_loss(data: Data, width: float = WIDE) -> Figure:
    """Mean fanout over the mean loss of each bin."""
    with style():
        figure, every = _by_layer(data, width)
        for axes in every:
            axes.set_ylim(bottom=0)
        outer_labels(every, "loss (nats)", FANOUT)
    return figure


def loss_by_fanout(data: Data, width: float = WIDE) -> Figure:
    """Mean loss over fanout."""
    with style():
        figure, every = _by_layer(data, width)
        for axes in every:
            whole_ticks(axes.xaxis, 6)
        outer_labels(every, FANOUT, "loss (nats)")
    return figure


def fanout_distribution(data: Data, width: float = WIDE) -> Figure:
    """The share of tokens by fanout, a panel for each method."""
    methods = data["methods"]
    with style():
        names = [entry["method"] for entry in methods]
        figure, every = panels(width, len(methods), height=1.2, left=0.62, titles=names)
        seen = max(int(np.flatnonzero(array(entry["share"]) >= 0.002).max(initial=0)) for entry in methods)
        for axes, entry, stroke in zip(every, methods, strokes(methods), strict=True):
            share = 100 * array(entry["share"])
            axes.bar(np.arange(len(share)), share, width=0.82, color=stroke["color"])
            axes.set_title(entry["method"], color=stroke["color"])
            mean = f"{entry['mean']:.2f} ± {entry['std']:.2f}"
            axes.annotate(mean, (1, 1), xycoords="axes fraction", ha="right", va="top", color=INK)
            whole_ticks(axes.xaxis, 6)
        most = max(100 * array(entry["share"]).max() for entry in methods)
        every[0].set(xlim=(-0.6, max(seen, 3) + 0.6), ylim=(0, 1.25 * most))  # of all panels; room for the mean
        outer_labels(every, FANOUT, "% of tokens")
    return figure


def _by_layer(data: Data, width: float, shift: float = 0) -> tuple[Figure, list[Axes]]:
    """shift: what is added to x, so that a logarithm can be taken."""
    methods = data["methods"]
    several = any(len(entry["layers"]) > 1 for entry in methods)
    names = ["one layer", "mean of layers"] if several else []
    figure, every = panels(
        width,
        len(methods),
        height=1.5,
        left=0.62,
        top=key_room(width, names) + 0.28,
        titles=[entry["method"] for entry in methods],
    )
    for axes, entry, stroke in zip(every, methods, strokes(methods), strict=True):
        x = array(entry["x"]) + shift
        if several:
            for values in entry["layers"].values():
                axes.plot(x, array(values), **ONE_LAYER)
        axes.plot(x, array(entry["mean"]), color=stroke["color"], linewidth=1.8, marker="o", markersize=2)
        axes.set_title(entry["method"], color=stroke["color"])
    if several:
        key(figure, names, [ONE_LAYER, MEAN])
    return figure, every

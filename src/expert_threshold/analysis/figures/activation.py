"""Dynamic computation: a token's routed experts by its position and by its loss (paper, Sec. 4.2.2)."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from ...model.trace import Trace
from ..material import Material, Study, of_each_method
from ..plain import Data, NotShownError, array
from ..records import Run
from ..sentences import each
from .plot import log2_axis, method_panels, whole_ticks
from .style import INK, ONE_LAYER, WIDE, Figure

BINS = 20
"""The number of bins of losses, each with the same number of tokens."""
SINGLE = 16
"""The number of first positions with a bin of their own; each later bin is a quarter wider than the last."""
FEWEST = 1 / 1000
"""The minimum share of the tokens for which a mean is shown."""

MEAN: dict[str, Any] = {"color": INK, "linewidth": 1.8, "marker": "o", "markersize": 2}
FANOUT, LOSS, POSITION = "routed experts per token", "loss (nats)", "position in the window"


def traced(material: Material, run: Run) -> Trace:
    """Return the run's trace. Raises NotShownError if every token has the same fanout."""
    if run.rule.biased_top_k(run.rule.init()) is not None:
        raise NotShownError("every token has the same number of routed experts")
    return material.trace(run)


@of_each_method
def fanout_by_position(material: Material, run: Run) -> Data:
    """Compute the mean fanout by position in the window, for each layer and over all layers."""
    trace = traced(material, run)
    edges = _position_edges(trace.context)
    place = np.searchsorted(edges, trace.positions, side="right") - 1
    layers = {layer: _means(place, trace.fanout(layer), len(edges) - 1) for layer in trace.layers}
    centres = [(a + b - 1) / 2 for a, b in pairwise(edges)]
    return {"x": centres, "layers": layers, "mean": np.mean(list(layers.values()), axis=0)}


def say_by_position(data: Data) -> str:
    def late_mean(entry: Data) -> float:
        x, mean = array(entry["x"]), array(entry["mean"])
        return float(np.nanmean(mean[x >= x[-1] / 2]))

    means = each(data, lambda entry: f"{entry['mean'][0]:.1f} and {late_mean(entry):.2f}")
    return f"The first token of a window and the tokens of its second half have mean fanouts over layers of {means}."


@of_each_method
def fanout_by_loss(material: Material, run: Run) -> Data:
    """Compute the mean fanout by loss on the next token, in bins of equal size, for each layer and over all layers."""
    trace = traced(material, run)
    known = np.isfinite(trace.losses)
    losses = trace.losses[known]
    parts = np.array_split(np.argsort(losses, kind="stable"), min(BINS, len(losses)))
    layers = {layer: [trace.fanout(layer)[known][part].mean() for part in parts] for layer in trace.layers}
    means = np.mean(list(layers.values()), axis=0)
    return {"x": [losses[part].mean() for part in parts], "layers": layers, "mean": means}


def say_fanout_by_loss(data: Data) -> str:
    def clause(entry: Data) -> str:
        mean, losses = array(entry["mean"]), array(entry["x"])
        peak = f"{mean.max():.2f} at {losses[mean.argmax()]:.1f} nats"
        return f"{mean[0]:.2f} and {mean[-1]:.2f}, with a peak of {peak},"

    means = each(data, clause)
    return f"The 5 % of tokens with the lowest loss and the 5 % with the highest have mean fanouts of {means}."


@of_each_method
def loss_by_fanout(material: Material, run: Run) -> Data:
    """Compute the mean loss by fanout, for each layer and over all layers, or NaN for fewer than a share FEWEST."""
    trace = traced(material, run)
    known = np.isfinite(trace.losses)
    losses = trace.losses[known]
    fanouts = {layer: trace.fanout(layer)[known] for layer in trace.layers}
    fewest = max(round(FEWEST * len(known)), 1)
    most = max(fanout.max(initial=0) for fanout in fanouts.values())
    layers = {layer: _means(fanout, losses, most + 1, fewest) for layer, fanout in fanouts.items()}
    every = np.concatenate(list(fanouts.values()))
    mean = _means(every, np.tile(losses, len(fanouts)), most + 1, fewest)
    seen = int(np.flatnonzero(np.isfinite(mean)).max(initial=0)) + 1
    layers = {layer: values[:seen] for layer, values in layers.items()}
    return {"x": np.arange(seen), "layers": layers, "mean": mean[:seen]}


def say_loss_by_fanout(data: Data) -> str:
    def clause(entry: Data) -> str:
        mean = array(entry["mean"])
        first, last = np.flatnonzero(np.isfinite(mean))[[0, -1]]
        return f"{mean[first]:.2f} nats with {first} and {mean[last]:.2f} with {last}"

    return f"Tokens with the fewest and the most routed experts in a layer have mean losses of {each(data, clause)}."


def draw_means(x: str, y: str, data: Data) -> Figure:
    """Draw a panel for each method: a dashed line for each layer, and a solid one for their mean."""
    several = any(len(entry["layers"]) > 1 for entry in data["methods"])
    key = {"one layer": ONE_LAYER, "mean of layers": MEAN} if several else {}
    figure, shown = method_panels(WIDE, data["methods"], 1.5, x, y, key=key)
    shared = shown[0][0]
    for axes, entry, stroke in shown:
        places = array(entry["x"]) + (x == POSITION)  # from 1, for a logarithmic axis
        for values in entry["layers"].values() if several else ():
            axes.plot(places, array(values), **ONE_LAYER)
        axes.plot(places, array(entry["mean"]), **(MEAN | {"color": stroke["color"]}))
    if x == POSITION:
        last = data["methods"][0]["x"][-1] + 1
        log2_axis(shared, [4**power for power in range(9) if 4**power <= last], "{:,}".format)
    elif x == FANOUT:
        whole_ticks(shared.xaxis)
    if y == FANOUT:
        shared.set_ylim(bottom=0)
    return figure


def _position_edges(context: int) -> np.ndarray:
    """Return the edges of bins of positions."""
    edges = list(range(min(SINGLE, context) + 1))
    while edges[-1] < context:
        edges.append(min(max(edges[-1] + 1, round(1.25 * edges[-1])), context))
    return np.array(edges)


def _means(place: np.ndarray, values: np.ndarray, count: int, fewest: int = 1) -> np.ndarray:
    """Return the mean of the values in each bin, (count,), or NaN for bins with fewer than `fewest` values."""
    numbers = np.bincount(place, minlength=count)
    totals = np.bincount(place, weights=values, minlength=count)
    return np.where(numbers >= fewest, totals / np.maximum(numbers, 1), np.nan)


FIGURES = [
    Study("fanout_by_position", "Fanout by position",
          fanout_by_position, partial(draw_means, POSITION, FANOUT), say_by_position),
    Study("fanout_by_loss", "Fanout by loss", fanout_by_loss, partial(draw_means, LOSS, FANOUT), say_fanout_by_loss),
    Study("loss_by_fanout", "Loss by fanout", loss_by_fanout, partial(draw_means, FANOUT, LOSS), say_loss_by_fanout),
]  # fmt: skip

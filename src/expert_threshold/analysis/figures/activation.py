"""Dynamic computation: how many routed experts a token meets, by its position and by its loss (paper, Sec. 4.2.2)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ...model.trace import Trace
from ..material import Material
from ..measures import fanout_distribution as shares_of
from ..methods import Subject
from ..plain import Data, NotShownError, array
from ..sentences import listed, percent
from .axes import fanout_bars, method_panels, whole_ticks
from .study import Study
from .style import INK, ONE_LAYER, WIDE, strokes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BINS = 20
"""Bins of losses, with equally many tokens in each."""
SINGLE = 16
"""Positions with a bin each; later ones share bins that widen by a quarter."""
FEWEST = 1 / 1000
"""The smallest share of the tokens for which a mean is shown."""

MEAN: dict[str, Any] = {"color": INK, "linewidth": 1.8, "marker": "o", "markersize": 2}
FANOUT = "routed experts per token"


def fanout_by_position(material: Material) -> Data:
    """Compute mean fanout by position in the window, per layer and over all layers."""

    def study(subject: Subject, trace: Trace) -> dict[str, Any]:
        edges = _position_edges(trace.context)
        place = np.searchsorted(edges, trace.positions, side="right") - 1
        layers = {layer: _means(place, trace.fanout(layer), len(edges) - 1) for layer in trace.layers}
        centres = [(a + b - 1) / 2 for a, b in pairwise(edges)]
        return {"x": centres, "layers": layers, "mean": np.mean(list(layers.values()), axis=0)}

    return _per_method(material, study)


def draw_fanout_by_position(data: Data) -> Figure:
    """Draw mean fanout over the position in the window, logarithmic."""
    figure, every = _by_layer(data, "position in the window", FANOUT, shift=1)
    last = array(data["methods"][0]["x"])[-1]
    ticks = [4**power for power in range(9) if 4**power <= last + 1]
    every[0].set_xscale("log", base=2)  # shared
    every[0].set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    every[0].set_xticks([], minor=True)
    every[0].set_ylim(bottom=0)
    return figure


def say_fanout_by_position(data: Data) -> str:
    parts = [f"{entry['mean'][0]:.1f} and {_late_mean(entry):.2f} in {entry['method']}" for entry in data["methods"]]
    return f"A window's first token and the tokens of its second half have mean fanouts over layers of {listed(parts)}."


def fanout_by_loss(material: Material) -> Data:
    """Compute mean fanout by the loss on the next token, in bins of equally many tokens, per layer and overall."""

    def study(subject: Subject, trace: Trace) -> dict[str, Any]:
        losses = trace.losses
        known = np.isfinite(losses)
        order = np.argsort(losses[known], kind="stable")
        parts = np.array_split(order, min(BINS, len(order)))
        layers = {layer: [trace.fanout(layer)[known][part].mean() for part in parts] for layer in trace.layers}
        return {
            "x": [losses[known][part].mean() for part in parts],
            "layers": layers,
            "mean": np.mean(list(layers.values()), axis=0),
        }

    return _per_method(material, study)


def draw_fanout_by_loss(data: Data) -> Figure:
    """Draw mean fanout over the mean loss of each bin."""
    figure, every = _by_layer(data, "loss (nats)", FANOUT)
    every[0].set_ylim(bottom=0)  # shared
    return figure


def say_fanout_by_loss(data: Data) -> str:
    parts = []
    for entry in data["methods"]:
        mean, losses = array(entry["mean"]), array(entry["x"])
        peak = f"with a peak of {mean.max():.2f} at {losses[mean.argmax()]:.1f} nats"
        parts.append(f"{mean[0]:.2f} and {mean[-1]:.2f} in {entry['method']}, {peak}")
    text = "The 5 % of tokens with the lowest loss and the 5 % with the highest have mean fanouts of"
    return f"{text} {'; '.join(parts)}."


def loss_by_fanout(material: Material) -> Data:
    """Compute mean loss by fanout, per layer and over all layers; missing for fewer than `FEWEST` of the tokens."""

    def study(subject: Subject, trace: Trace) -> dict[str, Any]:
        losses = trace.losses
        known = np.isfinite(losses)
        fanouts = {layer: trace.fanout(layer)[known] for layer in trace.layers}
        fewest = max(round(FEWEST * len(losses)), 1)
        most = max(fanout.max(initial=0) for fanout in fanouts.values())
        layers = {layer: _means(fanout, losses[known], most + 1, fewest) for layer, fanout in fanouts.items()}
        every = np.concatenate(list(fanouts.values()))
        mean = _means(every, np.tile(losses[known], len(fanouts)), most + 1, fewest)
        seen = int(np.flatnonzero(np.isfinite(mean)).max(initial=0)) + 1
        return {
            "x": np.arange(seen),
            "layers": {layer: values[:seen] for layer, values in layers.items()},
            "mean": mean[:seen],
        }

    return _per_method(material, study)


def draw_loss_by_fanout(data: Data) -> Figure:
    """Draw mean loss over fanout."""
    figure, every = _by_layer(data, FANOUT, "loss (nats)")
    whole_ticks(every[0].xaxis, 6)  # shared
    return figure


def say_loss_by_fanout(data: Data) -> str:
    parts = []
    for entry in data["methods"]:
        mean = array(entry["mean"])
        known = np.flatnonzero(np.isfinite(mean))
        parts.append(
            f"{mean[known[0]]:.2f} nats with {known[0]} and {mean[known[-1]]:.2f} with {known[-1]} in {entry['method']}"
        )
    return f"Tokens with the fewest and the most routed experts in a layer have mean losses of {listed(parts)}."


def fanout_distribution(material: Material) -> Data:
    """Compute the share of tokens with 0, 1, … routed experts of a layer, mean over layers."""
    methods = []
    for subject in material.routed:
        trace = material.trace(subject)
        shares = [shares_of(trace.assignment(layer)[None])[0].numpy() for layer in trace.layers]
        share = np.mean(shares, axis=0)
        mean = float(np.arange(len(share)) @ share)
        spread = float(((np.arange(len(share)) - mean) ** 2 @ share) ** 0.5)
        methods.append({**subject.tag, "share": share, "mean": mean, "std": spread})
    return {"methods": methods}


def draw_fanout_distribution(data: Data) -> Figure:
    """Draw the share of tokens by fanout, a panel for each method."""
    methods = data["methods"]
    figure, every = method_panels(WIDE, methods, 1.2, FANOUT, "% of tokens")
    texts = [f"{entry['mean']:.2f} ± {entry['std']:.2f}" for entry in methods]
    shares = [array(entry["share"]) for entry in methods]
    fanout_bars(every, shares, texts, [stroke["color"] for stroke in strokes(methods)])
    return figure


def _by_layer(data: Data, x: str, y: str, shift: float = 0) -> tuple[Figure, list[Axes]]:
    """Draw a panel for each method: layers dashed, their mean solid. shift: added to x, for a logarithmic axis."""
    methods = data["methods"]
    several = any(len(entry["layers"]) > 1 for entry in methods)
    key = {"one layer": ONE_LAYER, "mean of layers": MEAN} if several else {}
    figure, every = method_panels(WIDE, methods, 1.5, x, y, key=key)
    for axes, entry, stroke in zip(every, methods, strokes(methods), strict=True):
        places = array(entry["x"]) + shift
        for values in entry["layers"].values() if several else ():
            axes.plot(places, array(values), **ONE_LAYER)
        axes.plot(places, array(entry["mean"]), **(MEAN | {"color": stroke["color"]}))
    return figure, every


def say_fanout_distribution(data: Data) -> str:
    parts = [
        f"{entry['mean']:.2f} ± {entry['std']:.2f} in {entry['method']} ({percent(entry['share'][0])} of tokens at 0)"
        for entry in data["methods"]
    ]
    return f"The fanout in a layer, as mean ± standard deviation over tokens, is {listed(parts)}."


def _per_method(material: Material, study: Callable[[Subject, Trace], dict[str, Any]]) -> dict[str, Any]:
    """Apply `study` to the trace of each method in which fanout differs between tokens."""
    left_out = {
        subject.method: "every token has the same number of routed experts"
        for subject in material.routed
        if subject.rule.biased_top_k(subject.rule.init()) is not None
    }
    shown = [subject for subject in material.routed if subject.method not in left_out]
    if not shown:
        raise NotShownError("every token has the same number of routed experts in these runs")
    methods = [
        {**subject.tag, "target": subject.run.rule["experts_per_token"], **study(subject, material.trace(subject))}
        for subject in shown
    ]
    return {"methods": methods, "left_out": left_out}


def _position_edges(context: int) -> np.ndarray:
    """Return the edges of the bins of positions."""
    edges = list(range(min(SINGLE, context) + 1))
    while edges[-1] < context:
        edges.append(min(max(edges[-1] + 1, round(1.25 * edges[-1])), context))
    return np.array(edges)


def _means(place: np.ndarray, values: np.ndarray, count: int, fewest: int = 1) -> np.ndarray:
    """Return the mean of the values at each place, (count,); NaN for fewer than `fewest` values."""
    numbers = np.bincount(place, minlength=count)
    totals = np.bincount(place, weights=values, minlength=count)
    return np.where(numbers >= fewest, totals / np.maximum(numbers, 1), np.nan)


def _late_mean(entry: dict[str, Any]) -> float:
    """Return the mean over the second half of the window."""
    x, mean = array(entry["x"]), array(entry["mean"])
    return float(np.nanmean(mean[x >= x[-1] / 2]))


FIGURES = [
    Study("fanout_by_position", "Dynamic computation", "Fanout by position",
          fanout_by_position, draw_fanout_by_position, say_fanout_by_position),
    Study("fanout_by_loss", "Dynamic computation", "Fanout by loss",
          fanout_by_loss, draw_fanout_by_loss, say_fanout_by_loss),
    Study("loss_by_fanout", "Dynamic computation", "Loss by fanout",
          loss_by_fanout, draw_loss_by_fanout, say_loss_by_fanout),
    Study("fanout_distribution", "Dynamic computation", "Distribution of fanout",
          fanout_distribution, draw_fanout_distribution, say_fanout_distribution),
]  # fmt: skip

"""Figures of how methods learn, side by side. `data` are what the study of the same name found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..plain import Data, array
from ..sentences import pool_size
from .axes import key, key_room, label_ends, marker, outer_labels, panels, single, tokens_axis
from .style import INK, MUTED, NARROW, WIDE, strokes, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOSS = "validation loss (nats per token)"


def loss_by_method(data: Data, width: float = 1.6 * NARROW) -> Figure:
    """Validation loss of each method over tokens trained on; a band of one standard deviation over seeds."""
    with style():
        figure, axes = single(width, min(0.5 * width, 3.4))
        _curves(axes, data, "{:.3f}")
        axes.set_title(LOSS)
        tokens_axis(axes)
    return figure


def token_multiple(data: Data, width: float = WIDE) -> Figure:
    """Tokens that the reference needs for a loss over those that each method needs for it."""
    with style():
        figure, axes = single(width, 2)
        axes.axhline(1, color=MUTED, linewidth=0.8)
        _curves(axes, data, "{:.2f}")
        axes.set_title(f"tokens {data['reference']} needs / tokens for the same loss")
        tokens_axis(axes)
        axes.set_xlabel(f"tokens {data['reference']} was trained on", loc="right")
    return figure


def train_against_validation(data: Data, width: float = WIDE) -> Figure:
    """Running mean of the training loss, and the validation loss, of each method, over the last two thirds."""
    methods, drawn = data["methods"], strokes(data["methods"])
    with style():
        figure, every = panels(width, len(methods), height=1.4, left=0.62)
        low, high = [], []
        for axes, entry, stroke in zip(every, methods, drawn, strict=True):
            train, validation = array(entry["train"]), array(entry["validation"])
            axes.plot(*train.T, **stroke, **marker(len(train)))
            axes.plot(*validation.T, color=INK, linestyle=(0, (3, 1.5)), marker="o", markersize=2.5, linewidth=1)
            if entry["pools_gap"] is not None:
                pooled = validation[-1, 1] - entry["pools_gap"]
                axes.plot(validation[-1, 0], pooled, color=INK, marker="D", markersize=4, markerfacecolor="none")
            axes.set_title(entry["method"], color=stroke["color"])
            seen = np.concatenate([each[each[:, 0] >= train[-1, 0] / 3, 1] for each in (train, validation)])
            low.append(np.nanmin(seen))
            high.append(np.nanmax(seen))
        room = 0.06 * (max(high) - min(low))
        every[0].set_ylim(min(low) - room, max(high) + room)
        for axes in every:
            tokens_axis(axes)
            axes.set_xlim(left=axes.get_xlim()[1] / 3)
            axes.set_xlabel("")
        outer_labels(every, "tokens trained on", "nats per token")
    return figure


def batch_size_scaling(data: Data, width: float = NARROW) -> Figure:
    """Losses of expert choice over the tokens of its pool, and of expert threshold as lines across; CORE below."""
    with style():
        choice = sorted((entry for entry in data["methods"] if entry["pool"] is not None), key=lambda e: e["pool"])
        threshold = [entry for entry in data["methods"] if entry["pool"] is None]
        measured = any(entry["core"] is not None for entry in data["methods"])
        names = ["EC in training", "EC, validation", *(f"{entry['method']}, validation" for entry in threshold)]
        figure, every = panels(width, 1 + measured, 1.9, left=0.62, columns=1, top=key_room(width, names) + 0.22)
        pools = array([entry["pool"] for entry in choice])
        train, held_out = ({"color": MUTED, "marker": "o"}, {"color": strokes(choice[-1:])[0]["color"], "marker": "o"})
        for field, stroke in (("train", train), ("validation", held_out)):
            every[0].plot(pools, array([entry[field] for entry in choice]), **stroke)
        if measured:
            every[1].plot(pools, 100 * array([entry["core"] for entry in choice]), **held_out)
            every[1].set_ylabel("CORE (%)")
        lines = strokes(threshold)
        for entry, stroke in zip(threshold, lines, strict=True):
            every[0].axhline(entry["validation"], **stroke, linewidth=1.2)
            if entry["core"] is not None:
                every[1].axhline(100 * entry["core"], **stroke, linewidth=1.2)
        every[0].set_ylabel("nats per token")
        every[0].set_xscale("log", base=2)
        every[0].set_xticks(pools, [pool_size(entry["pool"]) for entry in choice])
        every[-1].set_xlabel("tokens of the pool of expert choice", loc="right")
        key(figure, names, [train, held_out, *lines])
    return figure


def shared_expert(data: Data, width: float = NARROW) -> Figure:
    """Validation losses with and without the shared expert."""
    return _variants(data, width)


def fanout_norm(data: Data, width: float = NARROW) -> Figure:
    """Validation losses without and with the fanout norm."""
    return _variants(data, width)


def _variants(data: Data, width: float) -> Figure:
    names = [entry["method"] for entry in data["methods"]]
    with style():
        figure, axes = single(width, 2.2, top=key_room(width, names) + 0.22)
        drawn = strokes(data["methods"])
        for entry, stroke in zip(data["methods"], drawn, strict=True):
            axes.plot(*array(entry["points"]).T, **stroke, marker="o")
        key(figure, names, drawn)
        _trim(axes, data)
        axes.set_title(LOSS)
        tokens_axis(axes)
    return figure


def _curves(axes: Axes, data: Data, number: str) -> None:
    labels: dict[str, Any] = {}
    for entry, stroke in zip(data["methods"], strokes(data["methods"]), strict=True):
        points = array(entry["points"]).reshape(-1, 2)
        axes.plot(*points.T, **stroke, marker="o", markersize=2.5)
        if any(entry.get("std", [])):
            std = array(entry["std"])
            axes.fill_between(
                points[:, 0], points[:, 1] - std, points[:, 1] + std, color=stroke["color"], alpha=0.15, linewidth=0
            )
        labels[entry["method"].replace("{", "{{").replace("}", "}}") + "  " + number] = (
            [(x, y) for x, y in points.tolist()],
            stroke["color"],
        )
    _trim(axes, data)
    label_ends(axes, labels)


def _trim(axes: Axes, data: Data) -> None:
    """Losses fall most at the beginning, where nothing is to be seen: the axis begins at the second validation's."""
    ys = [array(entry["points"]).reshape(-1, 2)[:, 1] for entry in data["methods"]]
    late = [y[1:] if len(y) > 2 else y for y in ys]
    low, high = (
        f([f(y[np.isfinite(y)], initial=start) for y in late]) for f, start in ((np.min, np.inf), (np.max, -np.inf))
    )
    if np.isfinite([low, high]).all() and high > low:
        axes.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))

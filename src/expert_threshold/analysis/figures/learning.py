"""Figures of how methods learn, side by side. `data` are what the study of the same name found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..plain import Data, array
from ..sentences import pool_size
from .axes import (
    key,
    key_room,
    marker,
    name_lines,
    named_lines,
    outer_labels,
    panels,
    room_for_names,
    single,
    tokens_axis,
)
from .style import INK, MUTED, NARROW, WIDE, strokes, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOSS = "validation loss (nats per token)"


def loss_by_method(data: Data, width: float = 1.6 * NARROW) -> Figure:
    """Validation loss of each method over tokens trained on; a band of one standard deviation over seeds."""
    return _curves(data, "{:.3f}", LOSS, width, min(0.5 * width, 3.4))


def token_multiple(data: Data, width: float = WIDE) -> Figure:
    """Tokens that the reference needs for a loss over those that each method needs for it."""
    title = f"tokens of {data['reference']} / tokens, at equal loss"
    figure = _curves(data, "{:.2f}", title, width, 2)
    with style():
        figure.axes[0].axhline(1, color=MUTED, linewidth=0.8)
        figure.axes[0].set_xlabel(f"tokens {data['reference']} was trained on", loc="right")
    return figure


def train_against_validation(data: Data, width: float = WIDE) -> Figure:
    """Running mean of the training loss, and the validation loss, of each method, over the last two thirds."""
    methods, drawn = data["methods"], strokes(data["methods"])
    causal: dict[str, Any] = {
        "color": INK, "linestyle": (0, (3, 1.5)), "marker": "o", "markersize": 2.5, "linewidth": 1
    }  # fmt: skip
    pools: dict[str, Any] = {
        "color": INK, "linestyle": "none", "marker": "D", "markersize": 4, "markerfacecolor": "none"
    }  # fmt: skip
    names, samples = ["training", "validation"], [{"color": MUTED, "linestyle": "-"}, causal]
    if any(entry["pools_gap"] is not None for entry in methods):
        names, samples = [*names, "validation, routed by the pools of training"], [*samples, pools]
    with style():
        figure, every = panels(
            width,
            len(methods),
            height=1.4,
            left=0.62,
            top=key_room(width, names) + 0.28,
            titles=[entry["method"] for entry in methods],
        )
        low, high = [], []
        for axes, entry, stroke in zip(every, methods, drawn, strict=True):
            train, validation = array(entry["train"]), array(entry["validation"])
            axes.plot(*train.T, **stroke, **marker(len(train)))
            axes.plot(*validation.T, **causal)
            if entry["pools_gap"] is not None:
                pooled = validation[-1, 1] - entry["pools_gap"]
                axes.plot(validation[-1, 0], pooled, **pools)
            axes.set_title(entry["method"], color=stroke["color"])
            seen = np.concatenate([each[each[:, 0] >= train[-1, 0] / 3, 1] for each in (train, validation)])
            low.append(np.nanmin(seen))
            high.append(np.nanmax(seen))
        room = 0.06 * (max(high) - min(low))
        every[0].set_ylim(min(low) - room, max(high) + room)
        for axes in every:
            tokens_axis(axes)
            axes.set_xlim(left=max(array(entry["train"])[-1, 0] for entry in methods) / 3)
            axes.set_xlabel("")
        outer_labels(every, "tokens trained on", "nats per token")
        key(figure, names, samples)
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
            every[0].axhline(entry["validation"], **stroke)
            if entry["core"] is not None:
                every[1].axhline(100 * entry["core"], **stroke)
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
    return _curves(data, "{:.3f}", LOSS, width, 2.2)


def _curves(data: Data, number: str, title: str, width: float, height: float) -> Figure:
    """A line for each method with the number that it ends at."""
    methods = data["methods"]
    every = [array(entry["points"]).reshape(-1, 2) for entry in methods]
    with style():
        lines = named_lines(methods, [[(x, y) for x, y in points.tolist()] for points in every], number)
        figure, axes = single(width, height, top=room_for_names(width, lines))
        for entry, points, line in zip(methods, every, lines, strict=True):
            axes.plot(*points.T, **line.stroke, marker="o", markersize=2.5)
            if any(entry.get("std", [])):
                low, high = (points[:, 1] + sign * array(entry["std"]) for sign in (-1, 1))
                axes.fill_between(points[:, 0], low, high, color=line.stroke["color"], alpha=0.15, linewidth=0)
        axes.set_title(title)
        tokens_axis(axes)
        _trim(axes, every)
        name_lines(axes, lines)
    return figure


def _trim(axes: Axes, every: Sequence[np.ndarray]) -> None:
    """Losses fall most at the beginning: both axes begin at the second point of lines that have three or more."""
    late = np.concatenate([points[1:] if len(points) > 2 else points for points in every])
    late = late[np.isfinite(late[:, 1])]
    if len(late):
        (left, low), (right, high) = late.min(0), late.max(0)
        room = 0.06 * (high - low) or max(abs(high), 1) / 50
        axes.set_ylim(low - room, high + room)
        room = 0.03 * (right - left) or right / 2
        axes.set_xlim(left - room, right + room)

"""Figures of loads, of what they cost at scale, and of the routing objective."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..plain import Data, array
from ..sentences import pool_size
from .axes import CHARACTER, by_layer, key, key_room, panels, ratio_axis, single
from .style import INK, MUTED, NARROW, WIDE, strokes, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def load_balance(data: Data, width: float = NARROW) -> Figure:
    """The busiest expert over the mean one, over layers, logarithmic; of a single layer, a dot for each method."""
    most = max((value for entry in data["methods"] for value in entry["spread"] if value is not None), default=1)
    return by_layer(data, "spread", "largest load / mean load", width, 1, lambda axis: ratio_axis(axis, most))


def load_at_scale(data: Data, width: float = WIDE) -> Figure:
    """The busiest over the mean by tokens and by devices, and the waiting; dots: resampled, lines: the closed form."""
    methods, drawn = data["methods"], strokes(data["methods"])
    names = [*(entry["method"] for entry in methods), "resampled", "closed form"]
    dots: dict[str, Any] = {"color": MUTED, "linestyle": "none", "marker": "o"}
    most, tokens, devices = data["experts"][-1], data["tokens_per_expert"], data["devices"]
    with style():
        figure, every = panels(
            width, 3, height=1.8, top=key_room(width, names) + 0.28, columns=3 if width > 6 else 1, share=False
        )
        for entry, stroke in zip(methods, drawn, strict=True):
            colour = {"color": stroke["color"]}
            experts, device = entry["by_tokens"], entry["by_devices"]
            every[0].plot(tokens, array(experts["closed_form"][-1]), **stroke, linewidth=1)
            every[0].plot(tokens, array(experts["resampled"][-1]), **(dots | colour))
            every[1].plot(devices, array(device["closed_form"]), **stroke, linewidth=1)
            every[1].plot(devices, array(device["resampled"]), **(dots | colour))
            wait = 100 * data["experts_share"] * (array(device["resampled"]) - 1)
            every[2].plot(devices, wait, **stroke, marker="o", linewidth=1)
        at = pool_size(data["at"])
        titles = (
            f"{pool_size(most)} experts: busiest / mean",
            f"with {at} tokens: busiest device",
            f"a step of {data['reference']} waits (%)",
        )
        labels = ("tokens per expert", "devices", "devices")
        for axes, title, label in zip(every, titles, labels, strict=True):
            axes.set_title(title)
            axes.set_xlabel(label, loc="right")
            axes.set_xscale("log", base=2)
            ticks = tokens if label.startswith("tokens") else devices
            axes.set_xticks(ticks[::2], [pool_size(tick) for tick in ticks[::2]])
            axes.set_ylim(bottom=0 if axes is every[2] else 1)
        key(figure, names, [*drawn, dots, {"color": MUTED, "linewidth": 1}])
    return figure


def objective(data: Data, width: float = NARROW) -> Figure:
    """The mean score of routed tokens of each rule beside the optima with as many routed tokens."""
    methods = data["methods"]
    marks: dict[str, tuple[str, dict[str, Any]]] = {
        "rule": ("the rule", {"marker": "o", "markersize": 6}),
        "balanced": ("Eq. 3, token and expert fixed", {"marker": "s", "markersize": 5, "markerfacecolor": "none"}),
        "choice": ("Eq. 4, expert fixed per batch", {"marker": "D", "markersize": 5, "markerfacecolor": "none"}),
        "population": ("Eq. 5, expert on average", {"marker": "^", "markersize": 6, "markerfacecolor": "none"}),
    }
    drawn = {name: mark for name, mark in marks.items() if any(entry.get(name) is not None for entry in methods)}
    names = [name for name, _ in drawn.values()]
    labels = [f"{entry['method']}, load {100 * entry['load']:.0f} %" for entry in methods]
    with style():
        left = max(map(len, labels)) * CHARACTER + 0.15
        figure, axes = single(width, 0.24 * len(methods) + 0.2, left=left, top=key_room(width, names) + 0.12)
        for row, (entry, stroke) in enumerate(zip(methods, strokes(methods), strict=True)):
            for name, (_, mark) in drawn.items():
                if entry.get(name) is not None:
                    axes.plot(entry[name], row, linestyle="none", color=stroke["color"], **mark)
        axes.set_yticks(np.arange(len(methods)), labels, color=INK)
        axes.set_ylim(len(methods) - 0.5, -0.5)
        axes.grid(axis="x")
        figure.text(0.99, 0.02, "mean score of a routed token (standard deviations)", color=MUTED, ha="right")
        key(figure, names, [{"color": MUTED, "linestyle": "none", **mark} for _, mark in drawn.values()])
    return figure

"""Figures of what an assignment can tell of the future, and of what it does tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..plain import Data, array
from ..sentences import pool_size
from .axes import key, key_room, outer_labels, panels, plain_ticks
from .style import ACCENT, INK, MUTED, SMALL, WIDE, strokes, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LEAST = 1e-6
"""Bits per token below which nothing is drawn."""


def leakage_bounds(data: Data, width: float = WIDE) -> Figure:
    """Bits per token over the pool's tokens: Eq. 7 and its bound; with finite cutoffs; and one choice as a cutoff."""
    exact: dict[str, Any] = {"color": ACCENT, "marker": "o"}
    lines: dict[str, tuple[str, dict[str, Any]]] = {
        "exact": ("Eq. 7, exactly", exact),
        "limit": ("its limit G·E·h(1/E)", {"color": ACCENT, "linestyle": (0, (1, 1.4))}),
        "bound": ("bound G·log₂(E − 1)", {"color": INK, "linestyle": (0, (4, 1.6)), "linewidth": 1}),
        "if_superlinear": ("if N·log₂ N", {"color": MUTED, "linewidth": 1}),
    }
    names = [name for name, _ in lines.values()]
    tokens = data["tokens"]
    with style():
        figure, every = panels(
            width,
            3,
            height=1.9,
            left=0.5,
            top=key_room(width, names) + 0.28,
            columns=3 if width > 6 else 1,
            share=False,
        )
        for name, (_, stroke) in lines.items():
            values = array(data[name]) if isinstance(data[name], list) else np.full(len(tokens), data[name])
            every[0].plot(tokens, values, **stroke)
        every[0].set_ylim(0, max(2.2 * data["limit"], 1.05 * data["if_superlinear"][2]))  # what is named is in sight
        every[0].set_title(f"bits per token, {data['layers']} layers")
        for shift, (bits, values) in zip((-10, 6), data["finite"].items(), strict=True):
            every[1].plot(tokens, array(values), color=ACCENT)
            middle = len(tokens) // 2
            every[1].annotate(
                f"{bits} bits", (tokens[middle], values[middle]), (shift, shift), textcoords="offset points",
                color=MUTED, ha="left" if shift > 0 else "right", va="center", fontsize=SMALL,
            )  # fmt: skip
        every[1].axhline(data["limit"], **lines["limit"][1])
        every[1].set_title("with cutoffs of so many bits")
        every[1].set_yscale("log")
        plain_ticks(every[1].yaxis, 7)
        for axes in every[:2]:
            axes.set_xscale("log", base=2)
            axes.set_xticks(tokens[::2], [_short(tick) for tick in tokens[::2]])
            axes.set_xlabel("tokens in the pool", loc="right")
        _binary_search(every[2], data["example"])
        key(figure, names, [stroke for _, stroke in lines.values()])
    return figure


def leakage_probe(data: Data, width: float = WIDE) -> Figure:
    """Bits that an assignment in training tells, over the tokens of the pool; a large dot is the pool trained with."""
    titles = {"pool": "of the rest of the pool", "future": "of its own future", "next": "of the next token"}
    methods = [entry for entry in data["methods"] if any((array(entry[name]) > LEAST).any() for name in titles)]
    drawn = strokes(methods)
    names = [entry["method"] for entry in methods]
    samples = list(drawn)
    if any(entry["own"] in entry["tokens"] for entry in methods):
        names.append("pool in training")
        samples.append({"color": MUTED, "linestyle": "none", "marker": "o", "markersize": 6})
    with style():
        figure, every = panels(
            width, 3, height=1.9, left=0.75, top=key_room(width, names) + 0.28, columns=3 if width > 6 else 1
        )
        ticks = sorted({size for entry in methods for size in entry["tokens"]})
        for axes, (name, title) in zip(every, titles.items(), strict=True):
            for entry, stroke in zip(methods, drawn, strict=True):
                bits = array(entry[name])
                shown = np.where(bits > LEAST, bits, np.nan)
                axes.plot(entry["tokens"], shown, **stroke, marker="o", markersize=2)
                if entry["own"] in entry["tokens"]:
                    own = entry["tokens"].index(entry["own"])
                    axes.plot(entry["own"], shown[own], "o", color=stroke["color"], markersize=6)
            axes.set_title(title)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
        every[0].set_xticks(ticks[:: -(-len(ticks) // 5)], [pool_size(tick) for tick in ticks[:: -(-len(ticks) // 5)]])
        plain_ticks(every[0].yaxis, 8)
        outer_labels(every, "tokens in the pool", "bits per token, all layers")
        key(figure, names, samples)
    return figure


def _binary_search(axes: Axes, example: Data) -> None:
    """The cutoffs left after each token, its score in their middle; filled if it exceeds the cutoff."""
    rows = range(len(example["choice"]))
    for row in rows:
        low, high = example["intervals"][row]
        axes.plot([low, high], [row, row], color=MUTED, linewidth=3, alpha=0.4, solid_capstyle="butt")
        fill = ACCENT if example["choice"][row] else "none"
        axes.plot(example["scores"][row], row, "o", color=ACCENT, markersize=5, markerfacecolor=fill)
    axes.axvline(example["cutoff"], color=INK, linewidth=0.8, linestyle=(0, (2, 1.5)))
    axes.set_yticks(rows, [f"{row + 1}: {int(example['choice'][row])}" for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(False)
    axes.set_title("token: choice, told by one cutoff")
    axes.set_xlabel("score, cutoff", loc="right")


def _short(tokens: int) -> str:
    return f"{tokens // 2**20}M" if tokens % 2**20 == 0 else pool_size(tokens)

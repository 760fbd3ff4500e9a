"""Figures of cutoffs: in training, out of the log, and in pools drawn from traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..plain import Data, array
from .axes import key, key_room, mark_warmup, marker, outer_labels, panels, plain_ticks, step_axis
from .style import INK, MUTED, ONE_LAYER, WIDE, strokes, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def cutoff_stability(data: Data, width: float = WIDE) -> Figure:
    """Over steps: batch cutoffs less their running mean, above; usage, below. Band: all experts; line: expert 0."""
    methods, drawn = data["methods"], strokes(data["methods"])
    names = [entry["method"] for entry in methods]
    with style():
        figure, every = panels(
            width, 2, height=1.4, left=0.62, top=key_room(width, names) + 0.28, columns=1, share=False
        )
        layer = methods[0]["layer"]
        titles = (f"batch cutoff less its running mean, layer {layer} (score)", f"expert usage, layer {layer} (%)")
        for axes, name, unit, title in zip(every, ("deviation", "usage"), (1, 100), titles, strict=True):
            late = []
            for entry, stroke in zip(methods, drawn, strict=True):
                steps, values = array(entry["steps"]), unit * array(entry[name])
                low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
                axes.fill_between(steps, low, high, color=stroke["color"], alpha=0.2, linewidth=0)
                axes.plot(steps, values[0], **stroke, linewidth=1.1, **marker(len(steps)))
                settled = steps > 0.25 * steps[-1]
                late += [low[settled].min(), high[settled].max()]
            room = 0.08 * (max(late) - min(late)) or max(abs(late[0]), 1) / 2
            axes.set_ylim(min(late) - room, max(late) + room)
            axes.set_title(title)
            step_axis(axes)
            mark_warmup(axes, max(entry["warmup"] for entry in methods), labelled=name == "deviation")
        every[1].axhline(100 * data["target"], color=INK, linewidth=0.7, linestyle=(0, (2, 2)))
        key(figure, names, drawn)
    return figure


def cutoff_law(data: Data, width: float = WIDE) -> Figure:
    """The spread of the k-th largest score over the tokens of the pool, logarithmic; dashed: independent tokens."""
    from matplotlib.ticker import NullLocator

    methods, drawn = data["methods"], strokes(data["methods"])
    names = [*(entry["method"] for entry in methods), "law of 1/√N"]
    law: dict[str, Any] = {"color": INK, "linestyle": (0, (3, 1.5)), "linewidth": 1}
    with style():
        figure, every = panels(width, 2, height=2, left=0.8, top=key_room(width, names) + 0.28)
        for axes, name, title in zip(
            every, ("by_token", "by_text"), ("pools of single tokens", "pools of text, as in training"), strict=True
        ):
            for entry, stroke in zip(methods, drawn, strict=True):
                axes.plot(entry["tokens"], array(entry[name]), **stroke, marker="o", linewidth=1.2)
            expected = np.exp(np.mean([np.log(array(entry["law"])) for entry in methods], axis=0))
            axes.plot(methods[0]["tokens"], expected, **law)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.yaxis.set_minor_locator(NullLocator())
            axes.set_title(title)
        ticks = methods[0]["tokens"][:: -(-len(methods[0]["tokens"]) // 6)]
        every[0].set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        ticks = [
            tick
            for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
            if every[0].get_ylim()[0] < tick < every[0].get_ylim()[1]
        ]
        every[0].set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        outer_labels(every, "tokens in the pool", "std of the k-th score\n/ std of scores")
        key(figure, names, [*drawn, law])
    return figure


def warmup(data: Data, width: float = WIDE) -> Figure:
    """The first steps with and without warmup: cutoffs, usage, starvation, spread of scores and gates."""
    methods, drawn = data["methods"], strokes(data["methods"])
    names = [*(entry["method"] for entry in methods), "batch cutoff"]
    shown = [
        ("cutoff", f"(a) layer {data['layer']}, cutoff (score)", 1),
        ("raw_usage", "(b) usage before bounds (%)", 100),
        ("starvation", "(c) starvation (%)", 100),
        ("other_cutoff", f"(d) layer {data['other_layer']}, cutoff (score)", 1),
        ("score_std", "(e) std of scores", 1),
        ("gate_std", "(f) std of gates", 1),
    ]
    with style():
        figure, every = panels(
            width, 6, height=1.3, top=key_room(width, names) + 0.28, columns=3 if width > 6 else 2, share=False
        )
        for axes, (name, title, unit) in zip(every, shown, strict=True):
            for entry, stroke in zip(methods, drawn, strict=True):
                points = array(entry[name]).reshape(-1, 2)
                if name == "cutoff":
                    batch = array(entry["batch_cutoff"])
                    axes.plot(*batch.T, color=stroke["color"], alpha=0.35, linewidth=0.8)
                axes.plot(points[:, 0], unit * points[:, 1], **stroke, linewidth=1.3)
            axes.set_title(title)
            step_axis(axes)
            if unit == 100:
                axes.set_ylim(bottom=0)
            mark_warmup(axes, data["warmup"], labelled=axes is every[0])
        every[1].axhline(100 * data["target"], color=INK, linewidth=0.7, linestyle=(0, (2, 2)))
        key(figure, names, [*drawn, {"color": MUTED, "alpha": 0.5, "linewidth": 0.8}])
    return figure


def capacity(data: Data, width: float = WIDE) -> Figure:
    """After warmup: usage before the bounds, saturation, starvation; layers dashed, their mean solid."""
    methods, drawn = data["methods"], strokes(data["methods"])
    names = ("one layer", *(entry["method"] for entry in methods))
    titles = {"raw_usage": "usage before bounds (%)", "saturation": "saturation (%)", "starvation": "starvation (%)"}
    with style():
        figure, every = panels(
            width, 3, height=1.5, top=key_room(width, names) + 0.28, columns=3 if width > 6 else 1, share=False
        )
        for axes, (name, title) in zip(every, titles.items(), strict=True):
            for entry, stroke in zip(methods, drawn, strict=True):
                layers = [array(points) for points in entry[name].values()]
                faint = ONE_LAYER | {"color": stroke["color"], "alpha": 0.4}
                for points in layers:
                    axes.plot(points[:, 0], 100 * points[:, 1], **faint)
                steps = layers[0][:, 0]
                axes.plot(steps, 100 * np.nanmean([points[:, 1] for points in layers], axis=0), **stroke)
            axes.set_title(title)
            axes.set_ylim(bottom=0)
            step_axis(axes)
        every[0].axhline(100 * methods[0]["target"], color=INK, linewidth=0.7, linestyle=(0, (2, 2)))
        key(figure, names, [ONE_LAYER, *drawn])
    return figure


def cutoffs_and_biases(data: Data, width: float = WIDE) -> Figure:
    """Over steps, a panel for each method: what is taken from the scores of each expert; expert 0 in bold."""
    methods, drawn = data["methods"], strokes(data["methods"])
    with style():
        figure, every = panels(width, len(methods), height=1.4, left=0.62)
        for axes, entry, stroke in zip(every, methods, drawn, strict=True):
            steps, values = array(entry["steps"]), array(entry["values"])
            axes.plot(steps, values.T, color=stroke["color"], alpha=0.35, linewidth=0.7, **marker(len(steps)))
            axes.plot(steps, values[0], **stroke, **marker(len(steps)))
            of = "cutoffs" if entry["of"] == "cutoff" else "− bias"
            axes.set_title(f"{entry['method']}, {of}", color=stroke["color"])
            step_axis(axes)
            axes.set_xlabel("")
        outer_labels(every, "step", f"score, layer {data['layer']}")
    return figure


def score_histograms(data: Data, width: float = WIDE) -> Figure:
    """The share of tokens by score, logarithmic; filled: those assigned; dashed: the cutoff."""
    shown = [(entry, each) for entry in data["methods"] for each in entry["experts"]]
    drawn = [stroke for stroke in strokes(data["methods"]) for _ in range(2)]
    with style():
        figure, every = panels(width, len(shown), height=1.2, left=0.62, columns=4 if width > 6 else 2)
        for axes, (entry, each), stroke in zip(every, shown, drawn, strict=True):
            _histogram(axes, each, entry["tokens"], stroke["color"])
            name = f"{entry['method']}, layer {each['layer']}, expert {each['expert']}"
            axes.set_title(name, color=stroke["color"], fontsize=8)
        every[0].set_yscale("log")
        plain_ticks(every[0].yaxis)
        every[0].set_ylim(0.5 * 100 / data["methods"][0]["tokens"], None)
        outer_labels(every, "score", "% of tokens")
    return figure


def _histogram(axes: Axes, of: Data, tokens: int, colour: str) -> None:
    edges = array(of["edges"])
    every, assigned = (100 * array(of[name]) / tokens for name in ("all", "assigned"))
    axes.stairs(every, edges, color=colour, alpha=0.25, fill=True)
    axes.stairs(assigned, edges, color=colour, fill=True)
    axes.stairs(every, edges, color=colour, linewidth=0.8)
    if of["cutoff"] is not None:
        axes.axvline(of["cutoff"], color=INK, linewidth=0.8, linestyle=(0, (2, 1.5)))

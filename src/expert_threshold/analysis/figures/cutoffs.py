"""Figures of cutoffs: in training, out of the log, and in pools drawn from traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..plain import Data, array
from .axes import expert_key, key, key_room, marker, outer_labels, panels, plain_ticks, step_axis
from .style import INK, MUTED, ONE_LAYER, SMALL, TARGET, WIDE, expert_colours, strokes, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def cutoff_stability(data: Data, width: float = WIDE) -> Figure:
    """Over steps, as recorded: batch cutoffs less their running mean; loads; experts at a capacity bound.

    Bands: all experts of the layer; lines: expert 0, and of the last panel the share of all experts of all layers.
    """
    methods, drawn = data["methods"], strokes(data["methods"])
    bounded = any(entry["bound"] is not None for entry in methods)
    names = [*(entry["method"] for entry in methods), "warmup ends"]
    where = f"layer {methods[0]['layer']}"
    titles = {
        "deviation": (f"batch cutoff less its running mean, {where} (score)", 1),
        "load": (f"load over the load aimed at, {where} (%)", 100),
        "bound": ("experts at a capacity bound, all layers (%)", 100),
    }
    end: dict[str, Any] = {"color": MUTED, "linewidth": 0.7, "linestyle": (0, (2, 2))}
    warm = max(entry["warmup"] for entry in methods)
    strokes_shown = [*drawn, end]
    with style():
        shown = [name for name in titles if name != "bound" or bounded]
        marked = any(array(entry["steps"])[0] < warm < array(entry["steps"])[-1] for entry in methods)
        if not marked:
            names, strokes_shown = names[:-1], drawn
        figure, every = panels(
            width, len(shown), height=1.3, left=0.62, top=key_room(width, names) + 0.28, columns=1, share=False
        )
        for axes, name in zip(every, shown, strict=True):
            title, unit = titles[name]
            late = []
            for entry, stroke in zip(methods, drawn, strict=True):
                if entry[name] is None:
                    continue
                steps, values = array(entry["steps"]), unit * np.atleast_2d(array(entry[name]))
                known = np.isfinite(values).any(axis=0)
                low, high = (edge(values[:, known], axis=0) for edge in (np.nanmin, np.nanmax))
                if len(values) > 1:
                    axes.fill_between(steps[known], low, high, color=stroke["color"], alpha=0.2, linewidth=0)
                axes.plot(steps, values[0], **stroke, linewidth=1.1, **marker(int(known.sum())))
                settled = steps[known] > 0.25 * steps[-1]
                late += [*low[settled], *high[settled]]
            axes.set_title(title)
            _frame(axes, late, bottom=0 if name == "bound" else None)
            ends = [array(entry["steps"])[place] for entry in methods for place in (0, -1)]
            axes.set_xlim(min(ends) - 0.5, max(ends) + 0.5)
            step_axis(axes)
            if marked:
                axes.axvline(warm, **end)
        every[1].axhline(100, **TARGET)
        key(figure, names, strokes_shown)
    return figure


def _frame(axes: Axes, values: Sequence[float], bottom: float | None) -> None:
    """What of y is shown: all the values, with some room; from `bottom` on if it is given."""
    if not values:
        return
    low, high = (min(values) if bottom is None else bottom), max(values)
    room = 0.08 * (high - low) or max(abs(high), 1) / 2
    axes.set_ylim(low - room if bottom is None else low - 0.3 * room, high + room)


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
            axes.plot(methods[0]["tokens"], expected, **law, **marker(len(expected)))
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.yaxis.set_minor_locator(NullLocator())
            axes.set_title(title)
        ticks = methods[0]["tokens"][:: -(-len(methods[0]["tokens"]) // (6 if width > 6 else 3))]
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
    faint: dict[str, Any] = {"color": MUTED, "alpha": 0.5, "linewidth": 0.8}
    ends: dict[str, Any] = {"color": MUTED, "linewidth": 0.7, "linestyle": (0, (2, 2))}
    names = [*(entry["method"] for entry in methods), "batch cutoff", "target", "warmup ends"]
    shown = [
        ("cutoff", f"(a) layer {data['layer']}, cutoff (score)", 1),
        ("raw_usage", "(b) usage before bounds (%)", 100),
        ("starvation", "(c) starvation (%)", 100),
        ("score_std", "(d) std of scores", 1),
        ("gate_std", "(e) std of gates", 1),
    ]
    if data["other_layer"] != data["layer"]:
        shown.append(("other_cutoff", f"(f) layer {data['other_layer']}, cutoff (score)", 1))
    with style():
        figure, every = panels(
            width,
            len(shown),
            height=1.3,
            top=key_room(width, names) + 0.28,
            columns=3 if width > 6 else 2,
            share=False,
        )
        for axes, (name, title, unit) in zip(every, shown, strict=True):
            for entry, stroke in zip(methods, drawn, strict=True):
                points = array(entry[name]).reshape(-1, 2)
                if name == "cutoff":
                    batch = array(entry["batch_cutoff"])
                    axes.plot(*batch.T, **(faint | {"color": stroke["color"]}))
                axes.plot(points[:, 0], unit * points[:, 1], **stroke, linewidth=1.3)
            axes.set_title(title)
            step_axis(axes)
            if unit == 100:
                axes.set_ylim(bottom=0)
            axes.axvline(data["warmup"], **ends)
        every[1].axhline(100 * data["target"], **TARGET)
        key(figure, names, [*drawn, faint, TARGET, ends])
    return figure


def capacity(data: Data, width: float = WIDE) -> Figure:
    """After warmup: usage before the bounds, saturation, starvation; layers dashed, their mean solid."""
    methods, drawn = data["methods"], strokes(data["methods"])
    several = any(len(entry["raw_usage"]) > 1 for entry in methods)
    names = [*(["one layer"] if several else []), *(entry["method"] for entry in methods), "target"]
    titles = {"raw_usage": "usage before bounds (%)", "saturation": "saturation (%)", "starvation": "starvation (%)"}
    with style():
        figure, every = panels(
            width, 3, height=1.5, top=key_room(width, names) + 0.28, columns=3 if width > 6 else 1, share=False
        )
        for axes, (name, title) in zip(every, titles.items(), strict=True):
            for entry, stroke in zip(methods, drawn, strict=True):
                layers = [array(points) for points in entry[name].values()]
                faint = ONE_LAYER | {"color": stroke["color"], "alpha": 0.4}
                for points in layers if several else []:
                    axes.plot(points[:, 0], 100 * points[:, 1], **faint)
                steps = layers[0][:, 0]
                axes.plot(steps, 100 * np.nanmean([points[:, 1] for points in layers], axis=0), **stroke)
            axes.set_title(title)
            axes.set_ylim(bottom=0)
            step_axis(axes)
        every[0].axhline(100 * methods[0]["target"], **TARGET)
        key(figure, names, [*([ONE_LAYER] if several else []), *drawn, TARGET])
    return figure


def cutoffs_and_biases(data: Data, width: float = WIDE) -> Figure:
    """Over steps, a panel for each method: what is taken from the scores of each expert, a colour for each."""
    methods, drawn = data["methods"], strokes(data["methods"])
    with style():
        titles = [f"{entry['method']}, {'cutoffs' if entry['of'] == 'cutoff' else '− bias'}" for entry in methods]
        figure, every = panels(width, len(methods), height=1.4, left=0.62, right=0.9, least=1.3, titles=titles)
        for axes, entry, title, stroke in zip(every, methods, titles, drawn, strict=True):
            steps, values = array(entry["steps"]), array(entry["values"])
            for expert, colour in zip(values, expert_colours(len(values)), strict=True):
                axes.plot(steps, expert, color=colour, linewidth=0.9, **marker(len(steps)))
            axes.set_title(title, color=stroke["color"])
            step_axis(axes)
            axes.set_xlabel("")
        outer_labels(every, "step", f"score, layer {data['layer']}")
        expert_key(figure, max(len(entry["values"]) for entry in methods))
    return figure


def score_histograms(data: Data, width: float = WIDE) -> Figure:
    """The share of tokens by score, logarithmic; filled: those assigned; dashed: the cutoff."""
    shown = [(entry, each) for entry in data["methods"] for each in entry["experts"]]
    drawn = [stroke for stroke in strokes(data["methods"]) for _ in range(2)]
    with style():
        names = [f"{entry['method']}\nlayer {each['layer']}, expert {each['expert']}" for entry, each in shown]
        figure, every = panels(width, len(shown), height=1.2, left=0.62, columns=4 if width > 6 else 2, titles=names)
        for axes, (entry, each), name, stroke in zip(every, shown, names, drawn, strict=True):
            _histogram(axes, each, entry["tokens"], stroke["color"])
            axes.set_title(name, color=stroke["color"], fontsize=SMALL)
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

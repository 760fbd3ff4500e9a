"""The figures of sweeps: losses by trial, curves of trials, losses over each option with their parabolas, and laws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from ..sweep import TOLERANCE
from .axes import few_ticks, method_strokes, panels, plain_ticks, single, whole_ticks
from .style import ACCENT, GRID, INK, MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEAD = 0.6
"""The share of the losses, from the best up, that a figure has room for; those of failures would flatten it."""


def finished(study: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the trials that have a loss."""
    return [trial for trial in study["trials"] if trial["loss"] is not None]


def draw_trials(study: Mapping[str, Any], width: float) -> Figure:
    """Draw the loss of each finished trial, and the best so far."""
    trials = finished(study)
    numbers, losses = [trial["trial"] for trial in trials], [trial["loss"] for trial in trials]
    figure, axes = single(width)
    axes.plot(numbers, losses, linestyle="none", marker="o", color=MUTED)
    axes.step([*numbers, len(study["trials"])], [*accumulate(losses, min), min(losses)], where="post", color=ACCENT)
    axes.set_title("loss (nats per token)")
    axes.set_xlabel("trial", loc="right")
    whole_ticks(axes.xaxis, 6)
    _limit(axes, losses)
    return figure


def draw_curves(study: Mapping[str, Any], width: float) -> Figure:
    """Draw the validation losses of each trial over its steps; the best in colour, those stopped early dashed."""
    best = study["best"]["trial"]
    figure, axes = single(width)
    for trial in study["trials"]:
        if trial["curve"]:
            steps, losses = zip(*trial["curve"], strict=True)
            is_best, stopped = trial["trial"] == best, trial["loss"] is None
            axes.plot(
                steps,
                losses,
                color=ACCENT if is_best else MUTED,
                linewidth=1.8 if is_best else 0.7,
                linestyle=(0, (3, 1.5)) if stopped else "-",
                marker="o" if len(steps) == 1 or is_best else None,
                zorder=3 if is_best else 2,
            )
    axes.set_title("validation loss (nats per token)")
    axes.set_xlabel("step", loc="right")
    whole_ticks(axes.xaxis, 5)
    _limit(axes, [loss for trial in study["trials"] for _, loss in trial["curve"]])
    return figure


def draw_options(study: Mapping[str, Any], width: float) -> Figure:
    """Draw the loss over each option: dots are trials, the line is the parabola, the band what is equally good."""
    options = study["options"]
    trials, best = finished(study), study["best"]
    losses = [trial["loss"] for trial in trials]
    figure, every = panels(width, len(options), 1.5, share=False, titles=list(options))
    for axes, (name, entry) in zip(every, options.items(), strict=True):
        axes.set_title(name, color=INK)
        if entry["scale"] is None:
            _draw_choice(axes, name, trials)
        else:
            _draw_number(axes, name, entry, trials)
        axes.plot([_place(axes, best["options"][name])], [best["loss"]], marker="o", markersize=6, color=ACCENT)
        _limit(axes, losses, least=min((e["fit"]["loss"] for e in options.values() if e["fit"]), default=math.inf))
    return figure


def draw_laws(laws: Sequence[Mapping[str, Any]], width: float) -> Figure:
    """Draw the best values of one option over each size, with the laws that were fitted to them.

    laws: of each method, as in `et sweep --fit`'s file. A dot is a sweep's optimum, divided by what the law says of
    the other sizes; its bar is the range that is equally good.
    """
    strokes = method_strokes([{**law, "kind": law["method"]} for law in laws])
    sizes = list(dict.fromkeys(size for law in laws for size in law["exponents"]))
    figure, every = panels(width, len(sizes), 1.8, share=False, left=0.62, right=0.25, titles=sizes, key=strokes)
    for axes, size in zip(every, sizes, strict=True):
        axes.set_title(size.replace("_", " "), color=INK)
        axes.set_xscale("log")
        axes.set_yscale("log")
        for place, law in enumerate(laws):
            if size in law["exponents"]:
                _draw_law(axes, law, size, 1.03 ** (place - (len(laws) - 1) / 2), strokes[law["method"]])
        seen = sorted({point["sizes"][size] for law in laws for point in law["points"]})
        axes.set_xticks(seen, [f"{value:,.0f}" for value in seen])
        axes.minorticks_off()
        few_ticks(axes.yaxis, *axes.get_ylim())
    every[0].set_ylabel(f"best {laws[0]['option']}")
    return figure


def _draw_law(axes: Axes, law: Mapping[str, Any], size: str, aside: float, stroke: Mapping[str, Any]) -> None:
    """Draw one method's law in one size. aside: a factor of the places of its dots, so that bars do not overlap."""
    for point in law["points"]:
        others = math.prod(
            (point["sizes"][name] / law["references"][name]) ** exponent
            for name, exponent in law["exponents"].items()
            if name != size
        )
        x = point["sizes"][size] * aside
        axes.plot([x], [point["value"] / others], marker="o", markersize=4, color=stroke["color"])
        if point["low"] is not None:
            axes.plot([x, x], [point["low"] / others, point["high"] / others], linewidth=1, color=stroke["color"])
    ends = np.array([end(point["sizes"][size] for point in law["points"]) for end in (min, max)])
    axes.plot(ends, law["constant"] * (ends / law["references"][size]) ** law["exponents"][size], **stroke)


def _draw_number(axes: Axes, name: str, entry: Mapping[str, Any], trials: Sequence[Mapping[str, Any]]) -> None:
    scale, fit = entry["scale"], entry["fit"]
    low, high = scale["low"], scale["high"]
    if scale["log"]:
        axes.set_xscale("log")
        if high / low >= 30:
            plain_ticks(axes.xaxis, 4)
        else:
            few_ticks(axes.xaxis, low, high)
    axes.plot(
        [trial["options"][name] for trial in trials],
        [trial["loss"] for trial in trials],
        linestyle="none",
        marker="o",
        color=MUTED,
    )
    if fit is not None:
        axes.axvspan(fit["low"], fit["high"], color=GRID, linewidth=0)
        x = np.geomspace(low, high, 100) if scale["log"] else np.linspace(low, high, 100)
        away = np.log(x / fit["optimum"]) if scale["log"] else x - fit["optimum"]
        axes.plot(x, fit["loss"] + fit["curvature"] * away**2, color=INK, linewidth=1)
    if scale["log"]:
        axes.set_xlim(low / 1.1, high * 1.1)


def _draw_choice(axes: Axes, name: str, trials: Sequence[Mapping[str, Any]]) -> None:
    values = sorted({str(trial["options"][name]) for trial in trials})
    for trial in trials:
        axes.plot([values.index(str(trial["options"][name]))], [trial["loss"]], marker="o", color=MUTED)
    axes.set_xticks(range(len(values)), values)
    axes.set_xlim(-0.5, len(values) - 0.5)


def _place(axes: Axes, value: Any) -> float:
    """Return the place of a value on the axis; that of a choice is the place of its label."""
    if not isinstance(value, str):
        return float(value)
    labels = [label.get_text() for label in axes.get_xticklabels()]
    return float(axes.get_xticks()[labels.index(value)])


def _limit(axes: Axes, losses: Sequence[float], least: float = math.inf) -> None:
    """Show the losses from the best, or `least`, to twice as far above the best as the better HEAD of them lie."""
    best = min(losses)
    reach = max(2 * (sorted(losses)[min(int(HEAD * len(losses)), len(losses) - 1)] - best), 4 * TOLERANCE)
    bottom, top = min(best, least), best + reach
    axes.set_ylim(bottom - 0.08 * (top - bottom), top)

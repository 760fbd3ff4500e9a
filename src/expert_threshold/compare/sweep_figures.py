"""The figures of sweeps: losses by trial, curves of trials, and losses over each option."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ..analysis.figures.axes import log_ticks, panels, single, whole_ticks
from ..analysis.figures.style import ACCENT, INK, MUTED, NARROW, WIDE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEAD = 0.6
"""The share of the losses, from the best up, that a figure has room for; those of failures would flatten it."""
ROOM = 0.02
"""The least range of losses, in nats per token, that a figure shows."""


def finished(study: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the trials that have a loss."""
    return [trial for trial in study["trials"] if trial["loss"] is not None]


def draw_trials(study: Mapping[str, Any]) -> Figure:
    """Draw the loss of each finished trial, and the best so far."""
    trials = finished(study)
    numbers, losses = [trial["trial"] for trial in trials], [trial["loss"] for trial in trials]
    figure, axes = single(NARROW, title="loss (nats per token)")
    _draw_losses(axes, numbers, losses)
    axes.step([*numbers, len(study["trials"])], [*accumulate(losses, min), min(losses)], where="post", color=ACCENT)
    axes.set_xlabel("trial", loc="right")
    whole_ticks(axes.xaxis)
    _limit(axes, losses)
    return figure


def draw_curves(study: Mapping[str, Any]) -> Figure:
    """Draw the validation losses of each trial over its steps; the best in colour, those stopped early dashed."""
    best = study["best"]["trial"]
    figure, axes = single(NARROW, title="validation loss (nats per token)")
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
    axes.set_xlabel("step", loc="right")
    whole_ticks(axes.xaxis)
    _limit(axes, [loss for trial in study["trials"] for _, loss in trial["curve"]])
    return figure


def draw_options(study: Mapping[str, Any]) -> Figure:
    """Draw the loss over each option: dots are trials."""
    options = study["options"]
    trials, best = finished(study), study["best"]
    losses = [trial["loss"] for trial in trials]
    figure, every = panels(WIDE, list(options), 1.5, share=False, colours=[INK] * len(options))
    for axes, (name, entry) in zip(every, options.items(), strict=True):
        if entry["scale"] is None:
            places = _choices(axes, entry["space"])
        else:
            places, scale = {}, entry["scale"]
            if scale["log"]:
                axes.set_xscale("log")
                axes.set_xlim(scale["low"] / 1.1, scale["high"] * 1.1)
                log_ticks(axes.xaxis, 4)
        values = [trial["options"][name] for trial in trials]
        _draw_losses(axes, [places.get(value, value) for value in values], losses)
        place = places.get(best["options"][name], best["options"][name])
        axes.plot([place], [best["loss"]], marker="o", markersize=6, color=ACCENT)
        _limit(axes, losses)
    return figure


def _draw_losses(axes: Axes, places: Sequence[float], losses: Sequence[float]) -> None:
    """Draw a dot for each loss, or a triangle at the upper edge for a loss beyond it."""
    top = _top(losses)
    for place, loss in zip(places, losses, strict=True):
        axes.plot([place], [min(loss, top)], marker="^" if loss > top else "o", color=MUTED, clip_on=False)


def _choices(axes: Axes, space: str) -> dict[str, int]:
    """Label the axis with the choices, numbers in their order, and return the place of each."""
    texts = space.split("|")
    with suppress(ValueError):
        texts = sorted(texts, key=float)
    axes.set_xticks(range(len(texts)), texts)
    axes.set_xlim(-0.5, len(texts) - 0.5)
    return {text: place for place, text in enumerate(texts)}


def _top(losses: Sequence[float]) -> float:
    """Return twice as far above the best loss as the better HEAD of them lie."""
    best = min(losses)
    return best + max(2 * (sorted(losses)[min(int(HEAD * len(losses)), len(losses) - 1)] - best), ROOM)


def _limit(axes: Axes, losses: Sequence[float]) -> None:
    """Show the losses from the best to `_top`."""
    bottom, top = min(losses), _top(losses)
    axes.set_ylim(bottom - 0.08 * (top - bottom), top)

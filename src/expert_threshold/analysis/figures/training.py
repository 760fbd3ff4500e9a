"""Figures of one training run: `train` and `validation` are the lines of metrics.jsonl of that split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..records import Points, Record, expert_series, layer_series, series
from .axes import (
    HEAT,
    LONGEST,
    expert_key,
    inner_labels_off,
    label_ends,
    layer_lines,
    line,
    mark_warmup,
    marker,
    panels,
    ratio_axis,
    single,
    smooth,
    step_axis,
    thin,
    tokens_axis,
    whole_ticks,
)
from .style import ACCENT, INK, MUTED, NARROW, WIDE, expert_colours, layer_colours, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Of heatmaps, whose opacity is the value, so that the page shows through in the middle of the scale.
ABOVE, BELOW, MISSING = HEAT, (0.87, 0.43, 0.08), (0.5, 0.5, 0.5)


def loss(train: Sequence[Record], validation: Sequence[Record], width: float = WIDE) -> Figure:
    """Cross-entropy (nats per token) over steps: training, raw and smoothed, and validation."""
    with style():
        figure, axes = single(width, height=2)
        raw, measured = series(train, "cross_entropy"), series(validation, "loss")
        smoothed = smooth(raw)
        line(axes, raw, MUTED, alpha=0.45, linewidth=0.8)
        line(axes, smoothed, ACCENT)
        line(axes, measured, INK, marker="o", linestyle="none", markersize=4)
        label_ends(axes, {"training {:.3f}": (smoothed, ACCENT), "validation {:.3f}": (measured, INK)})
        axes.set_title("cross-entropy (nats per token)")
        step_axis(axes)
    return figure


def bits_per_byte(points: Points, width: float = NARROW) -> Figure:
    """Bits per byte of the validation text over tokens trained on: (tokens, bits per byte)."""
    with style():
        figure, axes = single(width)
        line(axes, points, ACCENT, marker="o")
        label_ends(axes, {"{:.3f}": (points, ACCENT)})
        axes.set_title("validation, bits per byte")
        tokens_axis(axes)
    return figure


def usage(train: Sequence[Record], target: float, width: float = WIDE) -> Figure:
    """Share of tokens that each expert of each layer got over steps, as a multiple of the target share."""
    with style():
        shares = expert_series(train, "usage")
        figure, every = panels(width, len(shares), height=1.5, right=0.85, least=1.4)
        for axes, (layer, (steps, values)) in zip(every, shares.items(), strict=True):
            first, last = steps[0], steps[-1]
            columns = np.linspace(first, last, min(len(steps), LONGEST))
            nearest = np.abs(steps[None, :] - columns[:, None]).argmin(1)
            colours = deviation_colours(values[nearest].T / target)
            half = max((last - first) / max(len(columns) - 1, 1), 1) / 2
            extent = (first - half, last + half, values.shape[1] - 0.5, -0.5)
            axes.imshow(colours, extent=extent, aspect="auto", interpolation="none")
            axes.set_title(f"layer {layer}, expert")
            axes.spines[:].set_visible(True)  # a frame, since an expert at its target leaves no trace
            axes.grid(False)
            whole_ticks(axes.yaxis, 5)
            step_axis(axes)
        inner_labels_off(figure)
        _deviation_key(figure)
    return figure


def load_spread(
    train: Sequence[Record], validation: Sequence[Record], warmup_steps: int = 0, width: float = WIDE
) -> Figure:
    """The busiest expert's load over the mean load, per layer: lines in training, dots in validation."""
    with style():
        figure, axes = single(width)
        dots = layer_series(validation, "load_spread")
        for points, colour in zip(dots.values(), layer_colours(len(dots)), strict=True):
            line(axes, points, colour, marker="o", linestyle="none", markersize=4)
        lines = layer_series(train, "load_spread")
        every = [y for points in (*dots.values(), *lines.values()) for _, y in points if np.isfinite(y)]
        layer_lines(axes, lines, scale=lambda axis: ratio_axis(axis, max(every, default=1)))
        axes.set_title("largest load / mean load; dots: validation")
        step_axis(axes)
        mark_warmup(axes, warmup_steps)
    return figure


def cutoffs(train: Sequence[Record], warmup_steps: int = 0, width: float = WIDE) -> Figure:
    """Per layer, each expert's cutoff (the running mean) in its own colour over its batch cutoffs, in scores."""
    with style():
        means, batches = expert_series(train, "cutoff"), expert_series(train, "batch_cutoff")
        figure, every = panels(width, len(means), height=1.7, right=0.9, least=1.4)
        lines = sum(values.shape[1] for _, values in (*means.values(), *batches.values()))
        for axes, layer in zip(every, means, strict=True):
            if layer in batches:
                steps, values = thin(*batches[layer], lines)
                axes.plot(steps, values, color=MUTED, alpha=0.35, linewidth=0.7, **marker(len(steps)))
            steps, values = thin(*means[layer], lines)
            for expert, colour in zip(values.T, expert_colours(values.shape[1]), strict=True):
                axes.plot(steps, expert, color=colour, linewidth=1, **marker(len(steps)))
            axes.set_title(f"layer {layer}, score")
            step_axis(axes)
            mark_warmup(axes, warmup_steps, labelled=axes is every[0])
        inner_labels_off(figure)
        expert_key(figure, max(values.shape[1] for _, values in means.values()))
    return figure


def fanout(counts: Mapping[int, Sequence[int]], width: float = WIDE) -> Figure:
    """Per layer, the share of tokens with 0, 1, … routed experts. counts: layer -> tokens by fanout."""
    with style():
        shares = {layer: np.array(tokens) / max(sum(tokens), 1) for layer, tokens in counts.items()}
        seen = max(int(np.flatnonzero(share >= 0.001).max(initial=0)) for share in shares.values())
        figure, every = panels(width, len(shares), height=1.2)
        for axes, (layer, share), colour in zip(every, shares.items(), layer_colours(len(shares)), strict=True):
            axes.bar(np.arange(len(share)), 100 * share, width=0.82, color=colour)
            axes.set_title(f"layer {layer}, % of tokens")
            mean = float(np.arange(len(share)) @ share)
            axes.annotate(f"mean {mean:.2f}", (1, 1), xycoords="axes fraction", ha="right", va="top", color=INK)
            axes.set_xlabel("routed experts of a token", loc="right")
            whole_ticks(axes.xaxis, 8)
        most = max(100 * share.max() for share in shares.values())
        every[0].set(xlim=(-0.6, max(seen, 3) + 0.6), ylim=(0, 1.2 * most))  # of all panels; room for the mean on top
        inner_labels_off(figure)
    return figure


def saturation(train: Sequence[Record], warmup_steps: int = 0, width: float = NARROW) -> Figure:
    """Tokens dropped by the upper bound over tokens above the cutoff, in percent, per layer the mean over experts."""
    return _layers_over_steps(train, "saturation", "dropped, % of tokens above a cutoff", width, 100, warmup_steps)


def starvation(train: Sequence[Record], warmup_steps: int = 0, width: float = NARROW) -> Figure:
    """Tokens filled in by the lower bound over k, in percent, per layer the mean over experts."""
    return _layers_over_steps(train, "starvation", "filled in, % of the places aimed at", width, 100, warmup_steps)


def score_spread(train: Sequence[Record], width: float = NARROW) -> Figure:
    """Standard deviation of an expert's scores over tokens, per layer the mean over experts."""
    return _layers_over_steps(train, "score_std", "scores of an expert, standard deviation", width)


def gate_spread(train: Sequence[Record], width: float = NARROW) -> Figure:
    """Standard deviation of an expert's gates, σ(scores), over tokens, per layer the mean over experts."""
    return _layers_over_steps(train, "gate_std", "gates of an expert, standard deviation", width)


def speed(train: Sequence[Record], width: float = NARROW) -> Figure:
    """Tokens per second over steps, raw and smoothed."""
    from matplotlib.ticker import StrMethodFormatter

    with style():
        figure, axes = single(width)
        raw = series(train, "tokens_per_second")
        smoothed = smooth(raw)
        line(axes, raw, MUTED, alpha=0.45, linewidth=0.8)
        line(axes, smoothed, ACCENT)
        axes.set_ylim(bottom=0)
        label_ends(axes, {"{:,.0f}": (smoothed, ACCENT)})
        axes.set_title("tokens per second")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        step_axis(axes)
    return figure


def deviation_colours(ratio: np.ndarray) -> np.ndarray:
    """(…, 4) of multiples of a target: clear at 1, blue up to 2 and more, orange down to ½ and less, grey for none."""
    with np.errstate(divide="ignore"):
        doublings = np.clip(np.log2(ratio), -1, 1)
    missing = np.isnan(doublings)
    hue = np.where((doublings > 0)[..., None], ABOVE, BELOW)
    colours = np.concatenate([hue, np.abs(doublings)[..., None]], axis=-1)
    colours[missing] = (*MISSING, 0.3)
    return colours


def _layers_over_steps(
    train: Sequence[Record], key: str, title: str, width: float, unit: float = 1, warmup_steps: int = 0
) -> Figure:
    with style():
        figure, axes = single(width)
        values = layer_series(train, key)
        layer_lines(axes, {layer: [(x, unit * y) for x, y in points] for layer, points in values.items()})
        axes.set_title(title)
        step_axis(axes)
        mark_warmup(axes, warmup_steps)
    return figure


def _deviation_key(figure: Figure) -> None:
    """The scale of `deviation_colours`, right of the first row."""
    row = max(figure.axes, key=lambda axes: (axes.get_position().y1, axes.get_position().x1)).get_position()
    width = figure.get_figwidth()
    key = figure.add_axes((row.x1 + 0.1 / width, row.y0, 0.1 / width, row.height))
    scale = np.linspace(1, -1, 33)[:, None]
    key.imshow(deviation_colours(2**scale), extent=(0, 1, -1, 1), aspect="auto", interpolation="none")
    key.set_xticks([])
    key.set_yticks([-1, 0, 1], ["½ target", "target", "2 × target"])
    key.yaxis.tick_right()
    key.grid(False)

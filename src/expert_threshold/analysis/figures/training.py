"""The figures of a run's report: each drawing with its sentence, then the lists `LEARNING` and `ROUTING`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np

from ..page import Exhibit, exhibit
from ..records import Points, Record, Run, expert_series, finite, layer_series, mean_loss, series
from ..sentences import of_deviation, percent, short
from . import plot
from .style import ACCENT, INK, METHODS, MUTED, NARROW, WIDE, Figure, layer_colours

RAW: dict[str, Any] = {"colour": MUTED, "alpha": 0.45, "linewidth": 0.8}  # behind a running mean
LATE = 0.75
"""Sentences summarise the steps after this share of the run, that is, the last quarter."""


def draw_loss(run: Run) -> Figure:
    figure, axes = plot.single(WIDE, 2, "cross-entropy (nats per token)", counts="step")
    raw = series(run.train, "cross_entropy")
    plot.line(axes, raw, label="training", **RAW)
    trained = plot.line(axes, plot.smooth(raw), ACCENT, label="training, running mean")
    dots = {"marker": "o", "linestyle": "none", "markersize": 4}
    measured = plot.line(axes, series(run.validation, "loss"), INK, label="validation", **dots)
    plot.name_lines(axes, [trained, measured], "{:.3f}")
    return figure


def say_loss(run: Run) -> str:
    parts = []
    if made := finite(series(run.train, "cross_entropy")):
        (first, start), (last, end) = made[0], made[-1]
        parts.append(f"training went from {start:.3f} at step {first:,} to {end:.3f} at step {last:,}")
    if measured := finite(series(run.validation, "loss")):
        step, value = measured[-1]
        before, than = mean_loss(run.train, LATE, int(step)), ""
        if before is not None:
            side = "above" if value >= before else "below"
            than = f", {abs(value - before):.3f} {side} the mean training loss over the preceding quarter of the steps"
        step, lowest = min(measured, key=itemgetter(1))
        parts.append(f"validation ended at {value:.3f}{than}; the lowest was {lowest:.3f} at step {step:,}")
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


def learning_rates(run: Run) -> dict[str, Points]:
    """Return the learning rates of each group of parameters; groups with the same rates share a line."""
    lines: dict[tuple[tuple[float, float], ...], list[str]] = {}
    for group in run.train[-1]["learning_rate"] if run.train else ():
        rates = [(r["step"], r["learning_rate"][group]) for r in run.train if r["learning_rate"][group]]
        lines.setdefault(tuple(rates), []).append(group)
    return {", ".join(names): points for points, names in lines.items()}


def layer_lines(key: str, run: Run, split: str = "train") -> dict[str, list[tuple[float, float]]]:
    """Return the finite points of a measure for each layer, averaged over experts."""
    records = run.train if split == "train" else run.validation
    return {f"layer {layer}": finite(points) for layer, points in layer_series(records, key).items()}


def draw_usage(run: Run) -> Figure:
    shares = expert_series(run.train, "usage")
    figure, every = plot.panels(WIDE, [f"layer {layer}, expert" for layer in shares], 1.5, least=1.4, counts="step")
    for axes, (steps, values) in zip(every, shares.values(), strict=True):
        columns = np.linspace(steps[0], steps[-1], min(len(steps), plot.LONGEST))
        nearest = np.abs(steps[None, :] - columns[:, None]).argmin(1)
        half = max((steps[-1] - steps[0]) / max(len(columns) - 1, 1), 1) / 2
        extent = (steps[0] - half, steps[-1] + half, values.shape[1] - 0.5, -0.5)
        drawn = plot.deviations(axes, values[nearest].T / run.target, extent=extent)
    plot.colour_scale(every, drawn, {-1: "½ target", 0: "target", 1: "2 × target"})
    return figure


def say_usage(run: Run) -> str:
    shares = {
        f"expert {expert} of layer {layer}": fmean(late)
        for layer, (steps, values) in expert_series(run.train, "usage").items()
        for expert, column in enumerate(values.T)
        if (late := _late(list(zip(steps.tolist(), column.tolist(), strict=True))))
    }
    edges = (edge(shares.items(), key=itemgetter(1)) for edge in (min, max))
    low, high = (f"{percent(share)} ({name})" for name, share in edges)
    near = sum(run.target / 2 <= share <= 2 * run.target for share in shares.values())
    some = f"All {near} experts" if near == len(shares) else f"{near} of {len(shares)} experts"
    return (
        f"Over the last quarter of the steps, an expert got on average {low} to {high} of the tokens; the target is "
        f"{percent(run.target)}. {some} got between half and twice the target."
    )


def draw_load_spread(run: Run) -> Figure:
    """Draw the largest load / mean load of each layer over steps: lines for training, dots for validation."""
    figure, axes = plot.single(WIDE, title="largest load / mean load; dots: validation", counts="step")
    dots = layer_lines("load_spread", run, "validation")
    for (name, points), colour in zip(dots.items(), layer_colours(len(dots)), strict=True):
        plot.line(axes, points, colour, marker="o", linestyle="none", markersize=4, label=f"{name}, validation")
    plot.named_lines(axes, layer_lines("load_spread", run))
    plot.ratio_axis(axes)
    plot.mark_warmup(axes, run.warmup_steps)
    return figure


def say_load_spread(run: Run) -> str:
    return say_course(_load_spreads(run), "{:.2f}") + _each_point(run.train)


def draw_fanout(run: Run) -> Figure:
    shares = {layer: np.array(tokens) / max(sum(tokens), 1) for layer, tokens in run.fanout_counts.items()}
    titles = [f"layer {layer}, % of tokens" for layer in shares]
    figure, every = plot.panels(WIDE, titles, 1.2, "routed experts of a token")
    for axes, share, colour in zip(every, shares.values(), layer_colours(len(shares)), strict=True):
        axes.bar(np.arange(len(share)), 100 * share, width=0.82, color=colour)
        mean = f"mean {np.arange(len(share)) @ share:.2f}"
        axes.annotate(mean, (1, 1), xycoords="axes fraction", ha="right", va="top", color=INK)
    seen = max(int(np.flatnonzero(share >= 0.001).max(initial=0)) for share in shares.values())
    most = max(100 * share.max() for share in shares.values())
    every[0].set(xlim=(-0.6, max(seen, 3) + 0.6), ylim=(0, 1.25 * most))  # shared; leaves room for the text
    plot.whole_ticks(every[0].xaxis)
    return figure


def say_fanout(run: Run) -> str:
    total = np.sum([np.array(tokens, dtype=float) for tokens in run.fanout_counts.values()], axis=0)
    share = total / max(total.sum(), 1)
    return (
        f"A token went to {np.arange(len(share)) @ share:.2f} routed experts per layer on average; the target is "
        f"{run.rule.experts_per_token:g}. {percent(share[0])} of the tokens went to none, and no token went to more "
        f"than {int(np.flatnonzero(total).max(initial=0))}."
    )


def draw_cutoffs(run: Run) -> Figure:
    """Draw each expert's cutoff (the running mean, coloured) over its batch cutoffs (grey), for each layer."""
    means, batches = expert_series(run.train, "cutoff"), expert_series(run.train, "batch_cutoff")
    figure, every = plot.panels(WIDE, [f"layer {layer}, score" for layer in means], 1.7, least=1.4, counts="step")
    lines = sum(values.shape[1] for _, values in (*means.values(), *batches.values()))
    for axes, layer in zip(every, means, strict=True):
        if layer in batches:
            steps, values = plot.thin(*batches[layer], lines)
            axes.plot(steps, values, color=MUTED, alpha=0.35, linewidth=0.7, **plot.marker(len(steps)))
        plot.expert_lines(axes, *plot.thin(*means[layer], lines))
        plot.mark_warmup(axes, run.warmup_steps, labelled=axes is every[0])
    plot.expert_key(every, max(values.shape[1] for _, values in means.values()))
    return figure


def say_cutoffs(run: Run) -> str:
    ends = [values[np.isfinite(values).any(1)][-1] for _, values in expert_series(run.train, "cutoff").values()]
    text = f"The cutoffs end between {np.nanmin(ends):.2f} and {np.nanmax(ends):.2f}.".replace("-", "−")
    distances, spreads = (
        [y for points in layer_series(run.train, key).values() for y in _late(points)]
        for key in ("cutoff_distance", "score_std")
    )
    if not distances or not spreads:  # not finite
        return text
    return (
        f"{text} Over the last quarter of the steps, the cutoff of a batch (grey) lay on average "
        f"{fmean(distances):.3f} from the cutoff that its scores were compared with (one colour per expert)"
        f"{of_deviation(fmean(distances), fmean(spreads))}.{_each_point(run.train)}"
    )


def _late(points: Points) -> list[float]:
    """Return the numbers of the last quarter of the steps, or at least the last number."""
    numbers = finite(points)
    return [y for x, y in numbers if x > LATE * numbers[-1][0]]


def _each_point(train: Sequence[Record]) -> str:
    steps = max((record["steps"] for record in train), default=1)
    return "" if steps == 1 else f" Each point of training is the mean of {steps} steps."


class Chart(NamedTuple):
    """A figure of the report, for runs that recorded its numbers."""

    title: str
    numbers: Callable[[Run], object]
    draw: Callable[[Run], Figure]
    say: Callable[[Run], str]
    of_cutoffs: bool = False  # whether only rules with cutoffs record them

    def make(self, run: Run) -> tuple[str, Figure]:
        return self.say(run), self.draw(run)


def lines_chart(
    title: str,
    panel: str,
    lines: Callable[[Run], Mapping[str, Points]] | str,
    number: str = "{:.3g}",
    *,
    x: str = "step",
    scale: Literal["from 0", "free", "log"] = "from 0",
    share: bool = False,
) -> Chart:
    """Return a chart of named lines over steps or tokens. number: the format of the last values.

    lines: a function, or the key of a training number to draw in grey with its running mean. share: True for
    shares, which only rules with cutoffs record; they are drawn in percent, with the end of warmup marked.
    """
    unit, number = (100, "{:.3g} %") if share else (1, number)

    def known(run: Run) -> dict[str, list[tuple[float, float]]]:
        found = {panel: series(run.train, lines)} if isinstance(lines, str) else lines(run)
        return {name: [(x, unit * y) for x, y in points] for name, points in found.items() if finite(points)}

    def draw(run: Run) -> Figure:
        figure, axes = plot.single(NARROW, title=panel, counts=x)
        shown: Mapping[str, Points] = known(run)
        if isinstance(lines, str):
            plot.line(axes, shown[panel], label=panel, **RAW)
            shown = {"running mean": plot.smooth(shown[panel])}
        colours = [ACCENT] if len(shown) == 1 else METHODS if scale == "log" else layer_colours(len(shown))
        plot.named_lines(axes, shown, colours, "" if share or len(shown) > 1 else number)
        if scale == "log":
            axes.set_yscale("log")
            plot.log_ticks(axes.yaxis)
        elif scale == "from 0":
            axes.set_ylim(-0.03 * axes.get_ylim()[1], axes.get_ylim()[1])  # a line at 0 is drawn in full
            axes.yaxis.set_major_formatter("{x:,.10g}")
        if share:
            plot.mark_warmup(axes, run.warmup_steps)
        return figure

    def describe(run: Run) -> str:
        return say_course({name: finite(points) for name, points in known(run).items()}, number, x)

    return Chart(title, known, draw, describe, of_cutoffs=share)


def say_course(lines: Mapping[str, Points], number: str, x: str = "step") -> str:
    """Describe lines by the ranges of their first and last numbers, and by their lowest and highest points."""

    def shown(place: float) -> str:
        return f"at step {place:,}" if x == "step" else f"after {short(place)} tokens"

    def end(place: int) -> str:
        low, high = (number.format(edge(points[place][1] for points in lines.values())) for edge in (min, max))
        return f"{low if low == high else f'{low}–{high}'} {shown(max(points[place][0] for points in lines.values()))}"

    def edge(of: Callable[..., tuple[float, float, str]]) -> str:
        y, at, name = of(((y, at, name) for name, points in lines.items() for at, y in points), key=itemgetter(0))
        return f"{number.format(y)}, {shown(at)}{f' ({name})' if len(lines) > 1 else ''}"

    return f"It went from {end(0)} to {end(-1)}; the lowest is {edge(min)}, and the highest is {edge(max)}."


def _load_spreads(run: Run) -> dict[str, list[tuple[float, float]]]:
    return layer_lines("load_spread", run) or layer_lines("load_spread", run, "validation")


def _losses(run: Run) -> object:
    return finite(series(run.train, "cross_entropy")) or finite(series(run.validation, "loss"))


LEARNING = [
    Chart("Loss", _losses, draw_loss, say_loss),
    lines_chart("Bits per byte", "validation, bits per byte", lambda run: {"validation": run.bits_per_byte}, "{:.3f}",
                x="tokens trained on", scale="free"),
    lines_chart("Tokens per second", "tokens per second", "tokens_per_second", "{:,.0f}"),
    lines_chart("Learning rate", "learning rate", learning_rates, scale="log"),
    lines_chart("Gradient norm", "norm of the gradient, before clipping", "grad_norm", "{:.2g}"),
]  # fmt: skip
ROUTING = [
    Chart("Usage of each expert", lambda run: expert_series(run.train, "usage"), draw_usage, say_usage),
    Chart("Load spread", _load_spreads, draw_load_spread, say_load_spread),
    Chart("Fanout", lambda run: run.fanout_counts, draw_fanout, say_fanout),
    Chart("Cutoffs", lambda run: expert_series(run.train, "cutoff"), draw_cutoffs, say_cutoffs, of_cutoffs=True),
    lines_chart("Saturation", "dropped, % of tokens above a cutoff", partial(layer_lines, "saturation"), share=True),
    lines_chart("Starvation", "filled in, % of the target load", partial(layer_lines, "starvation"), share=True),
    lines_chart("Spread of scores", "scores of an expert, standard deviation", partial(layer_lines, "score_std")),
    lines_chart("Spread of gates", "gates of an expert, standard deviation", partial(layer_lines, "gate_std")),
]  # fmt: skip


def drawn(charts: Sequence[Chart], run: Run) -> Iterator[Exhibit]:
    """Draw the charts of a run."""
    if charts is ROUTING and (run.model.rule is None or run.model.dense_layers == run.model.layers):
        names = ", ".join(chart.title for chart in charts)
        yield Exhibit(names, "no layer of this model has routed experts")
        return
    for chart in charts:
        if chart.numbers(run):
            yield exhibit(chart.title, partial(chart.make, run))
        elif chart.of_cutoffs and not run.has_cutoffs:
            yield Exhibit(chart.title, f"the rule {run.rule_name} has no cutoffs")
        else:
            yield Exhibit(chart.title, "the run has not recorded its numbers yet")

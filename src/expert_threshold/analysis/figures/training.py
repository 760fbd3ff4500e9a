"""The figures of one run's report: each drawing beside its sentence, then the list of those that a run has.

`train` and `validation` are the lines of metrics.jsonl of that split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean, median
from typing import TYPE_CHECKING

import numpy as np

from ..page import Exhibit, LeftOut, exhibit
from ..records import Points, Record, expert_series, finite, layer_series, mean_loss, series
from ..run import Run
from ..sentences import listed, of_deviation, percent, short
from .axes import (
    HEAT,
    LONGEST,
    expert_key,
    expert_lines,
    fanout_bars,
    image,
    label_ends,
    layer_lines,
    line,
    log_ticks,
    mark_warmup,
    marker,
    panels,
    ratio_axis,
    scale_axes,
    single,
    smooth,
    step_axis,
    thin,
    tokens_axis,
    whole_ticks,
)
from .style import ACCENT, INK, METHODS, MUTED, NARROW, WIDE, layer_colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours of heatmaps, whose opacity is the value.
ABOVE, BELOW, MISSING = HEAT, (0.87, 0.43, 0.08), (0.5, 0.5, 0.5)
LATE = 0.75
"""Sentences summarise the steps after this share of the run, the last quarter."""
TITLES = {
    "saturation": ("dropped, % of tokens above a cutoff", 100),
    "starvation": ("filled in, % of the places aimed at", 100),
    "score_std": ("scores of an expert, standard deviation", 1),
    "gate_std": ("gates of an expert, standard deviation", 1),
}
"""Titles of panels, and units, by the name of the number in metrics.jsonl."""


def draw_loss(train: Sequence[Record], validation: Sequence[Record]) -> Figure:
    """Draw cross-entropy (nats per token) over steps: training, raw and smoothed, and validation."""
    measured = series(validation, "loss")
    figure, axes = single(WIDE, 2, "cross-entropy (nats per token)")
    smoothed = _draw_smoothed(axes, series(train, "cross_entropy"), "training")
    line(axes, measured, INK, marker="o", linestyle="none", markersize=4, label="validation")
    label_ends(axes, {"training {:.3f}": (smoothed, ACCENT), "validation {:.3f}": (measured, INK)})
    return figure


def _draw_smoothed(axes: Axes, raw: Points, name: str) -> Points:
    """Draw a line over steps, raw in grey and smoothed; return the latter."""
    smoothed = smooth(raw)
    line(axes, raw, MUTED, alpha=0.45, linewidth=0.8, label=name)
    line(axes, smoothed, ACCENT, label=f"{name}, running mean")
    step_axis(axes)
    return smoothed


def say_loss(train: Sequence[Record], validation: Sequence[Record]) -> str:
    made, measured = finite(series(train, "cross_entropy")), finite(series(validation, "loss"))
    parts = []
    if made:
        (first, start), (last, end) = made[0], made[-1]
        parts.append(f"training went from {start:.3f} at step {first:,} to {end:.3f} at step {last:,}")
    if measured:
        step, value = measured[-1]
        before, than = mean_loss(train, LATE, int(step)), ""
        if before is not None:
            side = "above" if value >= before else "below"
            than = f", {abs(value - before):.3f} {side} the mean of training over the quarter of the steps before"
        parts.append(f"validation ended at {value:.3f}{than}{_best(measured)}")
    return _sentence(parts)


def draw_bits_per_byte(points: Points) -> Figure:
    """Draw bits per byte of the validation text over tokens. points: (tokens, bits per byte)."""
    figure, axes = single(NARROW, title="validation, bits per byte")
    line(axes, points, ACCENT, marker="o", label="bits per byte")
    tokens_axis(axes)
    label_ends(axes, {"{:.3f}": (points, ACCENT)})
    return figure


def say_bits_per_byte(points: Points) -> str:
    numbers = finite(points)
    (first, start), (last, end) = numbers[0], numbers[-1]
    if len(numbers) == 1:
        return f"Validation gave {end:.3f} bits per byte after {short(last)} tokens."
    went = f"It went from {start:.3f} after {short(first)} tokens to {end:.3f} after {short(last)}"
    return f"{went}{_best(numbers, 'tokens')}."


def draw_usage(train: Sequence[Record], target: float) -> Figure:
    """Draw the usage of every expert over steps, as a multiple of the target."""
    shares = expert_series(train, "usage")
    figure, every = panels(WIDE, [f"layer {layer}, expert" for layer in shares], 1.5, least=1.4)
    for axes, (steps, values) in zip(every, shares.values(), strict=True):
        first, last = steps[0], steps[-1]
        columns = np.linspace(first, last, min(len(steps), LONGEST))
        nearest = np.abs(steps[None, :] - columns[:, None]).argmin(1)
        half = max((last - first) / max(len(columns) - 1, 1), 1) / 2
        extent = (first - half, last + half, values.shape[1] - 0.5, -0.5)
        image(axes, deviation_colours(values[nearest].T / target), extent)
        whole_ticks(axes.yaxis, 5)
        step_axis(axes)
    scale = scale_axes(every)
    image(scale, deviation_colours(2 ** np.linspace(1, -1, 33)[:, None]), (0, 1, -1, 1))
    scale.set_yticks([-1, 0, 1], ["½ target", "target", "2 × target"])
    return figure


def say_usage(train: Sequence[Record], target: float) -> str:
    shares = {
        (layer, expert): share
        for layer, values in _late_means(train, "usage").items()
        for expert, share in enumerate(values)
        if math.isfinite(share)
    }
    least, most = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
    if percent(shares[least]) == percent(shares[most]):
        return (
            f"Over the last quarter of the steps every expert got {percent(shares[least])} of the tokens; the target "
            f"is {percent(target)}."
        )
    near = sum(target / 2 <= share <= 2 * target for share in shares.values())
    return (
        f"Over the last quarter of the steps an expert got on average {percent(shares[least])} (expert {least[1]} of "
        f"layer {least[0]}) to {percent(shares[most])} (expert {most[1]} of layer {most[0]}) of the tokens; the "
        f"target is {percent(target)}. {_of_all(near, len(shares), 'expert')} got between half and twice the target."
    )


def draw_load_spread(train: Sequence[Record], validation: Sequence[Record], warmup_steps: int = 0) -> Figure:
    """Draw largest load / mean load per layer over steps: lines in training, dots in validation."""
    figure, axes = single(WIDE, title="largest load / mean load; dots: validation")
    dots = layer_series(validation, "load_spread")
    for (layer, points), colour in zip(dots.items(), layer_colours(len(dots)), strict=True):
        line(axes, points, colour, marker="o", linestyle="none", markersize=4, label=f"layer {layer}, validation")
    lines = layer_series(train, "load_spread")
    every = [y for points in (*dots.values(), *lines.values()) for _, y in points if np.isfinite(y)]
    layer_lines(axes, lines, scale=lambda axis: ratio_axis(axis, max(every, default=1)))
    step_axis(axes)
    mark_warmup(axes, warmup_steps)
    return figure


def say_load_spread(train: Sequence[Record], validation: Sequence[Record]) -> str:
    """Describe the spread: in training the mean over steps, in validation over all its tokens."""
    parts = []
    for what, records in (("a step of training", train), ("a validation", validation)):
        late = {layer: _late(points) for layer, points in layer_series(records, "load_spread").items()}
        means = {layer: fmean(values) for layer, values in late.items() if values}
        if means:
            worst = max(means, key=means.__getitem__)
            parts.append(f"{means[worst]:.2f} times the mean load in {what} (layer {worst})")
    had = " and ".join(parts)
    text = f"Over the last quarter of the steps the busiest expert of the worst layer had on average {had}."
    return f"{text}{_each_point(train)}"


def draw_cutoffs(train: Sequence[Record], warmup_steps: int = 0) -> Figure:
    """Draw each expert's cutoff (the running mean), coloured, over its batch cutoffs, grey, per layer."""
    means, batches = expert_series(train, "cutoff"), expert_series(train, "batch_cutoff")
    figure, every = panels(WIDE, [f"layer {layer}, score" for layer in means], 1.7, least=1.4)
    lines = sum(values.shape[1] for _, values in (*means.values(), *batches.values()))
    for axes, layer in zip(every, means, strict=True):
        if layer in batches:
            steps, values = thin(*batches[layer], lines)
            axes.plot(steps, values, color=MUTED, alpha=0.35, linewidth=0.7, **marker(len(steps)))
        expert_lines(axes, *thin(*means[layer], lines))
        step_axis(axes)
        mark_warmup(axes, warmup_steps, labelled=axes is every[0])
    expert_key(every, max(values.shape[1] for _, values in means.values()))
    return figure


def say_cutoffs(train: Sequence[Record]) -> str:
    ends = [values[np.isfinite(values).any(1)][-1] for _, values in expert_series(train, "cutoff").values()]
    low, high = float(np.nanmin(ends)), float(np.nanmax(ends))
    text = f"The cutoffs end between {low:.2f} and {high:.2f}.".replace("-", "−")
    distances, spreads = (
        [y for points in layer_series(train, key).values() for y in _late(points)]
        for key in ("cutoff_distance", "score_std")
    )
    if not distances or not spreads:  # not recorded
        return text
    return (
        f"{text} Over the last quarter of the steps the cutoff of a batch (grey) lay on average "
        f"{fmean(distances):.3f} from the cutoff that its scores were compared with (one colour per expert)"
        f"{of_deviation(fmean(distances), fmean(spreads))}.{_each_point(train)}"
    )


def draw_fanout(counts: Mapping[int, Sequence[int]]) -> Figure:
    """Draw the share of tokens by fanout, per layer. counts: layer -> tokens by fanout."""
    shares = {layer: np.array(tokens) / max(sum(tokens), 1) for layer, tokens in counts.items()}
    titles = [f"layer {layer}, % of tokens" for layer in shares]
    figure, every = panels(WIDE, titles, 1.2, "routed experts of a token")
    texts = [f"mean {np.arange(len(share)) @ share:.2f}" for share in shares.values()]
    fanout_bars(every, list(shares.values()), texts, layer_colours(len(shares)))
    return figure


def say_fanout(counts: Mapping[int, Sequence[int]], target: float) -> str:
    total = np.sum([np.array(tokens, dtype=float) for tokens in counts.values()], axis=0)
    share = total / max(total.sum(), 1)
    mean = float(np.arange(len(share)) @ share)
    most = int(np.flatnonzero(total).max(initial=0))
    return (
        f"A token went to {mean:.2f} routed experts per layer on average; the target is {target:g}. "
        f"{percent(share[0])} of the tokens went to none, and no token went to more than {most}."
    )


def draw_layers(train: Sequence[Record], key: str, warmup_steps: int = 0) -> Figure:
    """Draw a number of `TITLES` over steps, a line for each layer, averaged over experts."""
    title, unit = TITLES[key]
    figure, axes = single(NARROW, title=title)
    values = layer_series(train, key)
    layer_lines(axes, {layer: [(x, unit * y) for x, y in points] for layer, points in values.items()})
    step_axis(axes)
    mark_warmup(axes, warmup_steps)
    return figure


def say_bounded(train: Sequence[Record], key: str, exact_until: float) -> str:
    """Describe saturation or starvation.

    exact_until: the last step at which an expert takes exactly k tokens; infinite if that is every step.
    """
    every = [
        (step, value, layer) for layer, points in layer_series(train, key).items() for step, value in finite(points)
    ]
    after = [entry for entry in every if entry[0] > exact_until]
    step, most, layer = max(after or every, key=lambda entry: entry[1])
    mean = fmean(value for _, value, _ in after or every)
    when = "" if exact_until == 0 else "After warmup " if after else "While experts took exactly k tokens, "
    what = {
        "saturation": "of the tokens above a cutoff were dropped",
        "starvation": "of the places aimed at were filled with tokens below the cutoff",
    }[key]
    steps = _steps_of_a_line(train)
    most_of = "at most" if steps == 1 else f"in {steps} steps at most"
    return f"{when}{percent(mean)} {what} on average, {most_of} {percent(most)} (layer {layer}, step {step:,})."


def say_spread(train: Sequence[Record], key: str) -> str:
    """Describe the standard deviation of scores or gates: the first and the last of each layer."""
    lines = {layer: finite(points) for layer, points in layer_series(train, key).items()}
    (start, first), (end, last) = ((max(p[i][0] for p in lines.values()), i) for i in (0, -1))
    widest = max(lines, key=lambda layer: lines[layer][-1][1])
    where = f", largest in layer {widest}" if len(lines) > 1 else ""
    values = [_range([points[i][1] for points in lines.values()]) for i in (first, last)]
    return f"It went from {values[0]} at step {start:,} to {values[1]} at step {end:,}{where}."


def draw_smoothed(train: Sequence[Record], key: str, title: str, number: str) -> Figure:
    """Draw a number from 0 over steps, raw and smoothed. number: the format of the last one."""
    from matplotlib.ticker import StrMethodFormatter

    figure, axes = single(NARROW, title=title)
    smoothed = _draw_smoothed(axes, series(train, key), title)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    label_ends(axes, {number: (smoothed, ACCENT)})
    return figure


def draw_learning_rates(train: Sequence[Record]) -> Figure:
    """Draw the learning rate of each group of parameters over steps, logarithmic."""
    figure, axes = single(NARROW, title="learning rate")
    rates = {
        group: (points, colour) for (group, points), colour in zip(learning_rates(train).items(), METHODS, strict=False)
    }
    for group, (points, colour) in rates.items():
        line(axes, points, colour, label=group)
    axes.set_yscale("log")
    log_ticks(axes.yaxis)
    step_axis(axes)
    label_ends(axes, rates)
    return figure


def learning_rates(train: Sequence[Record]) -> dict[str, Points]:
    """Return the learning rates by group of parameters; groups with the same rates share a line."""
    groups = train[-1]["learning_rate"] if train else {}
    lines: dict[tuple[tuple[float, float], ...], list[str]] = {}
    for group in groups:
        rates = [(r["step"], r["learning_rate"][group]) for r in train if r.get("learning_rate", {}).get(group)]
        lines.setdefault(tuple(rates), []).append(group)
    return {", ".join(names): points for points, names in lines.items() if points}


def say_learning_rates(train: Sequence[Record]) -> str:
    rates = learning_rates(train).items()
    parts = [f"{max(y for _, y in points):.3g} to {points[-1][1]:.3g} ({group})" for group, points in rates]
    return f"From the highest to the last: {listed(parts)}."


def say_grad_norm(train: Sequence[Record]) -> str:
    norms = [y for _, y in finite(series(train, "grad_norm"))]
    step, most = max(finite(series(train, "grad_norm")), key=lambda point: point[1])
    return (
        f"The norm over all parameters, before clipping, has a median of {median(norms):.3g} and was {most:.3g} at "
        f"most, at step {step:,}."
    )


def say_speed(train: Sequence[Record]) -> str:
    rates = [y for _, y in finite(series(train, "tokens_per_second"))]
    return f"The median is {median(rates):,.0f} tokens per second; the range is {min(rates):,.0f} to {max(rates):,.0f}."


def deviation_colours(ratio: np.ndarray) -> np.ndarray:
    """Return RGBA (…, 4) for ratios to a target: clear at 1, blue to 2 and above, orange to ½ and below, grey NaN."""
    with np.errstate(divide="ignore"):
        doublings = np.clip(np.log2(ratio), -1, 1)
    missing = np.isnan(doublings)
    hue = np.where((doublings > 0)[..., None], ABOVE, BELOW)
    colours = np.concatenate([hue, np.abs(doublings)[..., None]], axis=-1)
    colours[missing] = (*MISSING, 0.3)
    return colours


def _sentence(parts: Sequence[str]) -> str:
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


def _best(points: Points, unit: str = "") -> str:
    """Return a clause on the lowest point, or on the last one if it is the lowest."""
    x, y = min(points, key=lambda point: point[1])
    if len(points) == 1:
        return ""
    if y == points[-1][1]:
        return "; it was never lower"
    where = f"after {short(x)} {unit}" if unit else f"at step {x:,}"
    return f"; the lowest was {y:.3f} {where}"


def _late(points: Points) -> list[float]:
    """Return the numbers of the last quarter of the steps, at least the last one."""
    numbers = finite(points)
    return [y for x, y in numbers if x > LATE * numbers[-1][0]]


def _late_means(train: Sequence[Record], key: str) -> dict[int, list[float]]:
    """Return layer -> each expert's mean over the last quarter of the steps; NaN without numbers."""
    means = {}
    for layer, (steps, values) in expert_series(train, key).items():
        columns = [[(float(x), float(y)) for x, y in zip(steps, column, strict=True)] for column in values.T]
        means[layer] = [fmean(late) if (late := _late(points)) else math.nan for points in columns]
    return means


def _steps_of_a_line(train: Sequence[Record]) -> int:
    """Return the steps that a line of metrics averages."""
    return max((int(record.get("steps", 1)) for record in train), default=1)


def _each_point(train: Sequence[Record]) -> str:
    steps = _steps_of_a_line(train)
    return "" if steps == 1 else f" Each point of training is the mean of {steps} steps."


def _range(values: Sequence[float]) -> str:
    """Return one value, or the range of several."""
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low}–{high}"


def _of_all(some: int, count: int, what: str) -> str:
    return f"All {count} {what}s" if some == count else f"{some} of {count} {what}s"


def learning(run: Run) -> Iterator[Exhibit | LeftOut]:
    train, validation, bits = run.train, run.validation, run.bits_per_byte
    yield _entry(
        "Loss",
        "no loss was recorded yet",
        finite(series(train, "cross_entropy")) or finite(series(validation, "loss")),
        partial(draw_loss, train, validation),
        partial(say_loss, train, validation),
    )
    yield _entry(
        "Bits per byte",
        "the run was not validated yet",
        finite(bits),
        partial(draw_bits_per_byte, bits),
        partial(say_bits_per_byte, bits),
    )
    yield _entry(
        "Tokens per second",
        "no line of training metrics was written yet",
        finite(series(train, "tokens_per_second")),
        partial(draw_smoothed, train, "tokens_per_second", "tokens per second", "{:,.0f}"),
        partial(say_speed, train),
    )
    yield _entry(
        "Learning rate",
        "no line of training metrics was written yet",
        learning_rates(train),
        partial(draw_learning_rates, train),
        partial(say_learning_rates, train),
    )
    yield _entry(
        "Gradient norm",
        "no line of training metrics was written yet",
        finite(series(train, "grad_norm")),
        partial(draw_smoothed, train, "grad_norm", "norm of the gradient", "{:.2g}"),
        partial(say_grad_norm, train),
    )


def routing(run: Run) -> Iterator[Exhibit | LeftOut]:
    if run.model.rule is None or run.model.dense_layers == run.model.layers:
        names = "Usage, load spread, fanout, cutoffs, saturation, starvation, spread of scores and gates"
        yield LeftOut(names, "no layer of this model has routed experts")
        return
    train, validation, warmup = run.train, run.validation, run.warmup_steps
    # A line covers the steps since the one before, so the first without warmup comes an interval after it.
    last_warm = warmup + run.config["train"]["log_every"] - 1 if warmup else 0
    rule = run.model.rule
    exact_until = math.inf if rule.looks_ahead else last_warm
    unrecorded = "no number of it was recorded yet"
    of_cutoff = unrecorded if run.has_cutoffs else f"the rule {run.rule_name} has no cutoffs"
    yield _entry(
        "Usage of each expert",
        unrecorded,
        expert_series(train, "usage"),
        partial(draw_usage, train, run.target),
        partial(say_usage, train, run.target),
    )
    yield _entry(
        "Load spread",
        unrecorded,
        layer_series(train, "load_spread") or layer_series(validation, "load_spread"),
        partial(draw_load_spread, train, validation, warmup),
        partial(say_load_spread, train, validation),
    )
    yield _entry(
        "Fanout",
        "the run was not validated yet",
        run.fanout_counts,
        partial(draw_fanout, run.fanout_counts),
        partial(say_fanout, run.fanout_counts, rule.experts_per_token),
    )
    yield _entry(
        "Cutoffs",
        of_cutoff,
        expert_series(train, "cutoff"),
        partial(draw_cutoffs, train, warmup),
        partial(say_cutoffs, train),
    )
    for title, key in (("Saturation", "saturation"), ("Starvation", "starvation")):
        draw, say = partial(draw_layers, train, key, warmup), partial(say_bounded, train, key, exact_until)
        yield _entry(title, of_cutoff, layer_series(train, key), draw, say)
    for title, key in (("Spread of scores", "score_std"), ("Spread of gates", "gate_std")):
        draw, say = partial(draw_layers, train, key, 0), partial(say_spread, train, key)
        yield _entry(title, unrecorded, layer_series(train, key), draw, say)


def _entry(
    title: str,
    why_not: str,
    numbers: object,
    draw: Callable[[], Figure],
    say: Callable[[], str],
) -> Exhibit | LeftOut:
    """Return the figure if there are numbers for it, else the reason for its absence."""
    return exhibit(title, say, draw) if numbers else LeftOut(title, why_not)

"""The figures of one run's report: each drawing beside its sentence, then the lists `LEARNING` and `ROUTING`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..page import Exhibit, LeftOut, exhibit
from ..records import Points, Record, Run, expert_series, finite, layer_series, mean_loss, series
from ..sentences import listed, of_deviation, percent, short
from .axes import (
    LONGEST,
    colour_scale,
    deviations,
    expert_key,
    expert_lines,
    fanout_bars,
    layer_lines,
    line,
    log_ticks,
    mark_warmup,
    marker,
    name_lines,
    panels,
    ratio_axis,
    single,
    smooth,
    step_axis,
    thin,
    whole_ticks,
)
from .style import ACCENT, INK, METHODS, MUTED, NARROW, WIDE, Axes, Figure, layer_colours

if TYPE_CHECKING:
    from matplotlib.lines import Line2D

LATE = 0.75
"""Sentences summarise the steps after this share of the run, the last quarter."""
TITLES = {
    "saturation": ("dropped, % of tokens above a cutoff", 100),
    "starvation": ("filled in, % of the places aimed at", 100),
    "score_std": ("scores of an expert, standard deviation", 1),
    "gate_std": ("gates of an expert, standard deviation", 1),
}
"""Titles of panels, and units, by the name of the number in metrics.jsonl."""


def draw_loss(run: Run) -> Figure:
    """Draw cross-entropy over steps: training, raw and smoothed, and validation."""
    figure, axes = single(WIDE, 2, "cross-entropy (nats per token)")
    trained = _draw_smoothed(axes, series(run.train, "cross_entropy"), "training")
    trained.set_label("training, running mean")
    dots = {"marker": "o", "linestyle": "none", "markersize": 4}
    measured = line(axes, series(run.validation, "loss"), INK, label="validation", **dots)
    name_lines(axes, [trained, measured], "{:.3f}")
    return figure


def _draw_smoothed(axes: Axes, raw: Points, name: str) -> Line2D:
    """Draw a line over steps, raw in grey and smoothed; return the latter."""
    line(axes, raw, MUTED, alpha=0.45, linewidth=0.8, label=name)
    step_axis(axes)
    return line(axes, smooth(raw), ACCENT, label="running mean")


def say_loss(run: Run) -> str:
    made, measured = finite(series(run.train, "cross_entropy")), finite(series(run.validation, "loss"))
    parts = []
    if made:
        (first, start), (last, end) = made[0], made[-1]
        parts.append(f"training went from {start:.3f} at step {first:,} to {end:.3f} at step {last:,}")
    if measured:
        step, value = measured[-1]
        before, than = mean_loss(run.train, LATE, int(step)), ""
        if before is not None:
            side = "above" if value >= before else "below"
            than = f", {abs(value - before):.3f} {side} the mean of training over the quarter of the steps before"
        parts.append(f"validation ended at {value:.3f}{than}{_best(measured)}")
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


def draw_bits_per_byte(run: Run) -> Figure:
    """Draw bits per byte of the validation text over tokens."""
    figure, axes = single(NARROW, title="validation, bits per byte")
    drawn = line(axes, run.bits_per_byte, ACCENT, marker="o", label="validation")
    step_axis(axes, "tokens trained on")
    name_lines(axes, [drawn], "{:.3f}")
    return figure


def say_bits_per_byte(run: Run) -> str:
    numbers = finite(run.bits_per_byte)
    (first, start), (last, end) = numbers[0], numbers[-1]
    if len(numbers) == 1:
        return f"Validation gave {end:.3f} bits per byte after {short(last)} tokens."
    went = f"It went from {start:.3f} after {short(first)} tokens to {end:.3f} after {short(last)}"
    return f"{went}{_best(numbers, 'tokens')}."


def draw_smoothed(key: str, title: str, number: str, run: Run) -> Figure:
    """Draw a number from 0 over steps, raw and smoothed. number: the format of the last one."""
    from matplotlib.ticker import StrMethodFormatter

    figure, axes = single(NARROW, title=title)
    drawn = _draw_smoothed(axes, series(run.train, key), title)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    name_lines(axes, [drawn], number)
    return figure


def say_number(key: str, what: str, run: Run) -> str:
    """Describe a number by its median and its range."""
    numbers = finite(series(run.train, key))
    middle = median(y for _, y in numbers)
    (first, low), (last, high) = (edge(numbers, key=lambda point: point[1]) for edge in (min, max))
    least, mid, most = map(("{:,.0f}" if middle >= 100 else "{:.3g}").format, (low, middle, high))
    ends = f"the lowest is {least}, at step {first:,}, and the highest {most}, at step {last:,}"
    return f"The median {what} is {mid}; {ends}."


def learning_rates(run: Run) -> dict[str, Points]:
    """Return the learning rates by group of parameters; groups with the same rates share a line."""
    lines: dict[tuple[tuple[float, float], ...], list[str]] = {}
    for group in run.train[-1]["learning_rate"] if run.train else ():
        rates = [(r["step"], r["learning_rate"][group]) for r in run.train if r["learning_rate"][group]]
        lines.setdefault(tuple(rates), []).append(group)
    return {", ".join(names): points for points, names in lines.items() if points}


def draw_learning_rates(run: Run) -> Figure:
    """Draw the learning rate of each group of parameters over steps, logarithmic."""
    figure, axes = single(NARROW, title="learning rate")
    rates = zip(learning_rates(run).items(), METHODS, strict=False)
    drawn = [line(axes, points, colour, label=group) for (group, points), colour in rates]
    axes.set_yscale("log")
    log_ticks(axes.yaxis)
    step_axis(axes)
    name_lines(axes, drawn)
    return figure


def say_learning_rates(run: Run) -> str:
    rates = learning_rates(run).items()
    parts = [f"{max(y for _, y in points):.3g} to {points[-1][1]:.3g} ({group})" for group, points in rates]
    return f"From the highest to the last: {listed(parts)}."


def draw_usage(run: Run) -> Figure:
    """Draw the usage of every expert over steps, as a multiple of the target."""
    shares = expert_series(run.train, "usage")
    figure, every = panels(WIDE, [f"layer {layer}, expert" for layer in shares], 1.5, least=1.4)
    for axes, (steps, values) in zip(every, shares.values(), strict=True):
        columns = np.linspace(steps[0], steps[-1], min(len(steps), LONGEST))
        nearest = np.abs(steps[None, :] - columns[:, None]).argmin(1)
        half = max((steps[-1] - steps[0]) / max(len(columns) - 1, 1), 1) / 2
        extent = (steps[0] - half, steps[-1] + half, values.shape[1] - 0.5, -0.5)
        drawn = deviations(axes, values[nearest].T / run.target, extent=extent)
        whole_ticks(axes.yaxis)
        step_axis(axes)
    colour_scale(every, drawn, {-1: "½ target", 0: "target", 1: "2 × target"})
    return figure


def say_usage(run: Run) -> str:
    shares = {
        (layer, expert): fmean(late)
        for layer, (steps, values) in expert_series(run.train, "usage").items()
        for expert, column in enumerate(values.T)
        if (late := _late(list(zip(steps.tolist(), column.tolist(), strict=True))))
    }
    least, most = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
    low, high, target = percent(shares[least]), percent(shares[most]), percent(run.target)
    if low == high:
        return f"Over the last quarter of the steps every expert got {low} of the tokens; the target is {target}."
    near = sum(run.target / 2 <= share <= 2 * run.target for share in shares.values())
    some = f"All {near} experts" if near == len(shares) else f"{near} of {len(shares)} experts"
    return (
        f"Over the last quarter of the steps an expert got on average {low} (expert {least[1]} of layer {least[0]}) to "
        f"{high} (expert {most[1]} of layer {most[0]}) of the tokens; the target is {target}. {some} got between half "
        "and twice the target."
    )


def draw_load_spread(run: Run) -> Figure:
    """Draw largest load / mean load per layer over steps: lines in training, dots in validation."""
    figure, axes = single(WIDE, title="largest load / mean load; dots: validation")
    dots, lines = (layer_series(records, "load_spread") for records in (run.validation, run.train))
    for (layer, points), colour in zip(dots.items(), layer_colours(len(dots)), strict=True):
        line(axes, points, colour, marker="o", linestyle="none", markersize=4, label=f"layer {layer}, validation")
    layer_lines(axes, lines)
    ratio_axis(axes)
    step_axis(axes)
    mark_warmup(axes, run.warmup_steps)
    return figure


def say_load_spread(run: Run) -> str:
    """Describe the spread: in training the mean over steps, in validation over all its tokens."""
    parts = []
    for what, records in (("a step of training", run.train), ("a validation", run.validation)):
        late = {layer: _late(points) for layer, points in layer_series(records, "load_spread").items()}
        means = {layer: fmean(values) for layer, values in late.items() if values}
        if means:
            worst = max(means, key=means.__getitem__)
            parts.append(f"{means[worst]:.2f} times the mean load in {what} (layer {worst})")
    text = "Over the last quarter of the steps the busiest expert of the worst layer had on average"
    return f"{text} {' and '.join(parts)}.{_each_point(run.train)}"


def draw_fanout(run: Run) -> Figure:
    """Draw the share of tokens by fanout in the last validation, per layer."""
    shares = {layer: np.array(tokens) / max(sum(tokens), 1) for layer, tokens in run.fanout_counts.items()}
    titles = [f"layer {layer}, % of tokens" for layer in shares]
    figure, every = panels(WIDE, titles, 1.2, "routed experts of a token")
    texts = [f"mean {np.arange(len(share)) @ share:.2f}" for share in shares.values()]
    fanout_bars(every, list(shares.values()), texts, layer_colours(len(shares)))
    return figure


def say_fanout(run: Run) -> str:
    total = np.sum([np.array(tokens, dtype=float) for tokens in run.fanout_counts.values()], axis=0)
    share = total / max(total.sum(), 1)
    return (
        f"A token went to {np.arange(len(share)) @ share:.2f} routed experts per layer on average; the target is "
        f"{run.rule['experts_per_token']:g}. {percent(share[0])} of the tokens went to none, and no token went to more "
        f"than {int(np.flatnonzero(total).max(initial=0))}."
    )


def draw_cutoffs(run: Run) -> Figure:
    """Draw each expert's cutoff (the running mean), coloured, over its batch cutoffs, grey, per layer."""
    means, batches = expert_series(run.train, "cutoff"), expert_series(run.train, "batch_cutoff")
    figure, every = panels(WIDE, [f"layer {layer}, score" for layer in means], 1.7, least=1.4)
    lines = sum(values.shape[1] for _, values in (*means.values(), *batches.values()))
    for axes, layer in zip(every, means, strict=True):
        if layer in batches:
            steps, values = thin(*batches[layer], lines)
            axes.plot(steps, values, color=MUTED, alpha=0.35, linewidth=0.7, **marker(len(steps)))
        expert_lines(axes, *thin(*means[layer], lines))
        step_axis(axes)
        mark_warmup(axes, run.warmup_steps, labelled=axes is every[0])
    expert_key(every, max(values.shape[1] for _, values in means.values()))
    return figure


def say_cutoffs(run: Run) -> str:
    ends = [values[np.isfinite(values).any(1)][-1] for _, values in expert_series(run.train, "cutoff").values()]
    low, high = float(np.nanmin(ends)), float(np.nanmax(ends))
    text = f"The cutoffs end between {low:.2f} and {high:.2f}.".replace("-", "−")
    distances, spreads = (
        [y for points in layer_series(run.train, key).values() for y in _late(points)]
        for key in ("cutoff_distance", "score_std")
    )
    if not distances or not spreads:  # not finite
        return text
    return (
        f"{text} Over the last quarter of the steps the cutoff of a batch (grey) lay on average "
        f"{fmean(distances):.3f} from the cutoff that its scores were compared with (one colour per expert)"
        f"{of_deviation(fmean(distances), fmean(spreads))}.{_each_point(run.train)}"
    )


def draw_layers(key: str, run: Run) -> Figure:
    """Draw a number of `TITLES` over steps, a line for each layer, averaged over experts."""
    title, unit = TITLES[key]
    figure, axes = single(NARROW, title=title)
    values = layer_series(run.train, key)
    layer_lines(axes, {layer: [(x, unit * y) for x, y in points] for layer, points in values.items()})
    axes.set_ylim(-0.03 * axes.get_ylim()[1], axes.get_ylim()[1])  # a line at 0 is whole
    step_axis(axes)
    if unit == 100:
        mark_warmup(axes, run.warmup_steps)
    return figure


def say_bounded(key: str, run: Run) -> str:
    """Describe saturation or starvation, after the steps in which every expert takes exactly k tokens if possible."""
    rule, warmup = run.model.rule, run.warmup_steps
    # A line covers the steps since the one before, so the first without warmup comes an interval after it.
    exact_until = warmup + run.config["train"]["log_every"] - 1 if warmup else 0
    if rule is not None and rule.looks_ahead:
        exact_until = math.inf
    every = [(s, value, layer) for layer, points in layer_series(run.train, key).items() for s, value in finite(points)]
    after = [entry for entry in every if entry[0] > exact_until]
    step, most, layer = max(after or every, key=lambda entry: entry[1])
    mean = fmean(value for _, value, _ in after or every)
    when = "" if exact_until == 0 else "After warmup " if after else "While experts took exactly k tokens, "
    what = {
        "saturation": "of the tokens above a cutoff were dropped",
        "starvation": "of the places aimed at were filled with tokens below the cutoff",
    }[key]
    steps = _steps_of_a_line(run.train)
    most_of = "at most" if steps == 1 else f"in {steps} steps at most"
    return f"{when}{percent(mean)} {what} on average, {most_of} {percent(most)} (layer {layer}, step {step:,})."


def say_spread(key: str, run: Run) -> str:
    """Describe the standard deviation of scores or gates: the first and the last of each layer."""
    lines = {layer: finite(points) for layer, points in layer_series(run.train, key).items()}
    widest = max(lines, key=lambda layer: lines[layer][-1][1])
    where = f", largest in layer {widest}" if len(lines) > 1 else ""
    ends = []
    for place in (0, -1):
        low, high = (f"{edge(points[place][1] for points in lines.values()):.3g}" for edge in (min, max))
        step = max(points[place][0] for points in lines.values())
        ends.append(f"{low if low == high else f'{low}–{high}'} at step {step:,}")
    return f"It went from {ends[0]} to {ends[1]}{where}."


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


def _steps_of_a_line(train: Sequence[Record]) -> int:
    """Return the steps that a line of metrics averages."""
    return max((record["steps"] for record in train), default=1)


def _each_point(train: Sequence[Record]) -> str:
    steps = _steps_of_a_line(train)
    return "" if steps == 1 else f" Each point of training is the mean of {steps} steps."


class Chart(NamedTuple):
    """A figure of the report, for runs that recorded its numbers. of_cutoffs: a rule without cutoffs never does."""

    title: str
    numbers: Callable[[Run], object]
    draw: Callable[[Run], Figure]
    say: Callable[[Run], str]
    of_cutoffs: bool = False


def _over_steps(key: str, title: str, name: str, panel: str, number: str) -> Chart:
    """Return the chart of a number per step. name: in the sentence; number: the format of the last one."""
    draw, say = partial(draw_smoothed, key, panel, number), partial(say_number, key, name)
    return Chart(title, lambda run: finite(series(run.train, key)), draw, say)


def _by_layer(key: str, title: str, say: Callable[[str, Run], str], of_cutoffs: bool = False) -> Chart:
    """Return the chart of a number of `TITLES`."""
    return Chart(
        title, lambda run: layer_series(run.train, key), partial(draw_layers, key), partial(say, key), of_cutoffs
    )


def _by_expert(key: str) -> Callable[[Run], object]:
    return lambda run: expert_series(run.train, key)


def _losses(run: Run) -> object:
    return finite(series(run.train, "cross_entropy")) or finite(series(run.validation, "loss"))


def _load_spreads(run: Run) -> object:
    return layer_series(run.train, "load_spread") or layer_series(run.validation, "load_spread")


LEARNING = [
    Chart("Loss", _losses, draw_loss, say_loss),
    Chart("Bits per byte", lambda run: finite(run.bits_per_byte), draw_bits_per_byte, say_bits_per_byte),
    _over_steps("tokens_per_second", "Tokens per second", "speed", "tokens per second", "{:,.0f}"),
    Chart("Learning rate", learning_rates, draw_learning_rates, say_learning_rates),
    _over_steps("grad_norm", "Gradient norm", "norm", "norm of the gradient, before clipping", "{:.2g}"),
]
ROUTING = [
    Chart("Usage of each expert", _by_expert("usage"), draw_usage, say_usage),
    Chart("Load spread", _load_spreads, draw_load_spread, say_load_spread),
    Chart("Fanout", lambda run: run.fanout_counts, draw_fanout, say_fanout),
    Chart("Cutoffs", _by_expert("cutoff"), draw_cutoffs, say_cutoffs, of_cutoffs=True),
    _by_layer("saturation", "Saturation", say_bounded, of_cutoffs=True),
    _by_layer("starvation", "Starvation", say_bounded, of_cutoffs=True),
    _by_layer("score_std", "Spread of scores", say_spread),
    _by_layer("gate_std", "Spread of gates", say_spread),
]


def drawn(charts: Sequence[Chart], run: Run) -> Iterator[Exhibit | LeftOut]:
    """Draw the charts of a run."""
    if charts is ROUTING and (run.model.rule is None or run.model.dense_layers == run.model.layers):
        names = ", ".join(chart.title for chart in charts)
        yield LeftOut(names, "no layer of this model has routed experts")
        return
    for chart in charts:
        if chart.numbers(run):
            yield exhibit(chart.title, partial(chart.say, run), partial(chart.draw, run))
        elif chart.of_cutoffs and not run.has_cutoffs:
            yield LeftOut(chart.title, f"the rule {run.rule_name} has no cutoffs")
        else:
            yield LeftOut(chart.title, "the run has recorded no number of it yet")

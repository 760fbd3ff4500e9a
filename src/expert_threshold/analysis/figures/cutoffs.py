"""Cutoffs: their stability against loads, their warmup, and the effect of capacity bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...routing import kth_largest
from ..material import Material, NotShownError
from ..methods import Subject, pool_tokens
from ..plain import Data, array
from ..records import Record, expert_series, layer_series
from ..sentences import listed, percent, signed
from .axes import expert_key, key, key_room, marker, outer_labels, panels, plain_ticks, step_axis
from .study import Study
from .style import INK, MUTED, ONE_LAYER, SMALL, TARGET, WIDE, expert_colours, strokes, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 240
"""The most points of a line over steps; more are indistinguishable."""
POOLS = 96
"""Pools of each size in which the k-th largest score is measured."""
SMALLEST, LARGEST = 64, 2**15
"""Sizes of these pools in tokens; the largest is at most an eighth of the trace."""


def cutoff_stability(material: Material) -> Data:
    """Collect cutoffs and loads in training, of the largest pool and of a rule that trains by running means.

    See the paper, Cutoff vs Expert Usage. All values are those recorded over steps. For each expert of the middle
    layer: `deviation`, the batch cutoff less the running mean at the start of the step, and `load`, divided by the load
    aimed at. `distance`: mean |`deviation`| over experts and the last quarter of the steps, None if it was not
    recorded. Over all layers: `bound`, the share of experts whose load a capacity bound changed at some step of a line
    of the log, and `bound_share`, its mean. Both are None without bounds, and `bound` is NaN during warmup.
    """
    choices, thresholds = _by_cutoff(material)
    shown = sorted(choices, key=lambda s: pool_tokens(s.run) or 0)[-1:] + thresholds[:1]
    if not shown:
        raise NotShownError("no run has cutoffs")
    methods = []
    for subject in shown:
        layer = subject.layers[len(subject.layers) // 2]
        steps, means = _experts(subject, "cutoff", layer)
        _, batches = _experts(subject, "batch_cutoff", layer)
        _, usage = _experts(subject, "usage", layer)
        bound = _at_bounds(subject)
        methods.append(
            {
                **subject.tag,
                "exact": subject.rule.looks_ahead,
                "layer": layer,
                "warmup": subject.run.warmup_steps,
                "steps": steps,
                "deviation": (batches - means).T,
                "distance": _mean_distance(subject, layer),
                "load": usage.T / subject.run.target,
                "bound": None if bound is None else _thinned(bound, bound)[0],
                "bound_share": None if bound is None or np.isnan(bound).all() else float(np.nanmean(bound)),
                "score_std": float(np.nanmean(_experts(subject, "score_std", layer)[1][-10:])),
                "interval": subject.run.config["train"]["log_every"],
            }
        )
    return {"methods": methods}


def _by_cutoff(material: Material) -> tuple[list[Subject], list[Subject]]:
    """Return the methods with cutoffs: those that look ahead in training, and those that train by the cutoffs."""
    found = [subject for subject in material.routed if subject.has_cutoffs]
    return [s for s in found if s.rule.looks_ahead], [s for s in found if not s.rule.looks_ahead]


def _mean_distance(subject: Subject, layer: int) -> float | None:
    """Return the mean of |batch cutoff − running mean| over experts and the last quarter of the steps."""
    found = expert_series(subject.run.train, "cutoff_distance").get(layer)
    return None if found is None else float(np.nanmean(found[1][found[0] > 0.75 * found[0][-1]]))


def _at_bounds(subject: Subject) -> np.ndarray | None:
    """Return the share of all layers' experts at a capacity bound, for each line of the log; NaN during warmup."""
    if not subject.has_bounds:
        return None
    train, interval = subject.run.train, subject.run.config["train"]["log_every"]
    dropped, filled = (expert_series(train, key) for key in ("saturation", "starvation"))
    if not dropped.keys() == filled.keys() == set(subject.layers):
        return None  # not recorded
    steps = next(iter(dropped.values()))[0]
    at_bound = [np.maximum(dropped[layer][1], filled[layer][1]) for layer in dropped]
    moved = np.concatenate(at_bound, axis=1)
    share = np.where(np.isfinite(moved).any(1), np.nansum(moved > 0, axis=1) / moved.shape[1], np.nan)
    # A line covers the `interval` steps up to its own.
    return np.where(steps - interval >= subject.run.warmup_steps, share, np.nan)


def draw_cutoff_stability(data: Data, width: float = WIDE) -> Figure:
    """Draw batch cutoffs less their running mean, loads, and experts at a capacity bound over steps.

    Bands cover all experts of the layer. Lines are expert 0; in the last panel, the share of all layers' experts.
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
    """Set the y limits to the values with some room, or from `bottom` if given."""
    if not values:
        return
    low, high = (min(values) if bottom is None else bottom), max(values)
    room = 0.08 * (high - low) or max(abs(high), 1) / 2
    axes.set_ylim(low - room if bottom is None else low - 0.3 * room, high + room)


def say_cutoff_stability(data: Data) -> str:
    parts, layer = [], data["methods"][0]["layer"]
    for entry in data["methods"]:
        late = array(entry["steps"]) > 0.75 * entry["steps"][-1]
        deviation, load = (array(entry[name])[:, late] for name in ("deviation", "load"))
        off = np.nanmean(np.abs(deviation)) if entry["distance"] is None else entry["distance"]
        apart = float(np.nanmean(np.abs(load - 1)))
        share = percent(off / entry["score_std"])
        parts.append(
            f"the batch cutoffs of {entry['method']} lie {off:.3f} from their running means, {share} of the scores' "
            f"standard deviation, and its loads {percent(apart)} from the load aimed at"
        )
    text = f"Over the last quarter of the steps in layer {layer}, on average, {'; '.join(parts)}."
    if (steps := max(entry["interval"] for entry in data["methods"])) > 1:
        text += f" Each point, and each of these loads, is the mean of {steps} steps."
    for entry in data["methods"]:
        text += f" {entry['method']} routes by the batch cutoff, so its loads are exact." if entry["exact"] else ""
    if (threshold := next((entry for entry in data["methods"] if not entry["exact"]), None)) is None:
        return text
    text += f" {threshold['method']} routes by the running mean, so the batch's deviation shows in the loads instead"
    if threshold["bound"] is None:
        return f"{text}."
    if threshold["bound_share"] is None:
        return f"{text}; no step after its warmup was recorded yet."
    every = threshold["interval"]
    what = "steps and experts" if every == 1 else f"experts and intervals of {every} steps, at one step or more"
    return f"{text}; after warmup a capacity bound decided in {percent(threshold['bound_share'])} of {what}."


def cutoff_law(material: Material) -> Data:
    """Compute the spread of a pool's k-th largest score by pool size, in standard deviations of the expert's scores.

    Values are root mean squares over experts and layers. Pools are drawn from the trace, token by token and by text: a
    stretch of a window or, for larger pools, whole windows as in training. `slope` is the fitted exponent, −½ for the
    law of 1/√N. `law`: √(p(1 − p)/N) / f(cutoff), expected for independent tokens, where p is an expert's share of the
    tokens and f the density of its scores at the cutoff.
    """
    methods = []
    for subject in material.each("deviation of cutoffs", material.routed):
        trace = material.trace(subject)
        share = subject.run.target
        smallest = max(SMALLEST, math.ceil(4 / share))
        sizes = [size for power in range(30) if (size := smallest * 2**power) <= min(len(trace) // 8, LARGEST)]
        if not sizes:
            raise NotShownError(f"it needs a trace of {8 * smallest} tokens or more; give more --tokens")
        found = [_spreads(trace.scores(layer), sizes, share, trace.context) for layer in trace.layers]
        by_token, by_text, law = (np.sqrt(np.mean(np.square(part), axis=(0, 2))) for part in zip(*found, strict=True))
        methods.append(
            {
                **subject.tag,
                "tokens": sizes,
                "by_token": by_token,
                "by_text": by_text,
                "law": law,
                "slope_by_token": _slope(sizes, by_token),
                "slope_by_text": _slope(sizes, by_text),
            }
        )
    return {"methods": methods}


def draw_cutoff_law(data: Data, width: float = WIDE) -> Figure:
    """Draw the spread of the k-th largest score over pool size, logarithmic; dashed: independent tokens."""
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


def say_cutoff_law(data: Data) -> str:
    alone, text = (
        [f"{entry['method']} {signed(entry[name], 2)}" for entry in data["methods"]]
        for name in ("slope_by_token", "slope_by_text")
    )
    ratio = np.mean([array(entry["by_text"])[-1] / array(entry["by_token"])[-1] for entry in data["methods"]])
    return (
        "The spread of cutoffs falls as a power of the pool size N, which is −0.50 by the law of 1/√N. Fitted to pools "
        f"of single tokens it is {listed(alone)}; to pools of text, {listed(text)}. In the largest pools the spread is "
        f"{ratio:.1f} times as large with text as with single tokens, since neighbouring tokens are not independent."
    )


def warmup(material: Material) -> Data:
    """Collect the first steps with and without warmup, and those of the largest pool (paper, Warmup).

    Starvation counts tokens filled in by the lower bound, which does not act during warmup.
    """
    choices, thresholds = _by_cutoff(material)
    if len({subject.run.warmup_steps > 0 for subject in thresholds}) < 2:
        raise NotShownError(
            "it needs a rule that trains by running means of cutoffs, with a warmup and with --warmup-steps 0"
        )
    shown = thresholds + sorted(choices, key=lambda s: pool_tokens(s.run) or 0)[-1:]
    ends = max(subject.run.warmup_steps for subject in thresholds)
    layers = shown[0].layers
    late, early = layers[3 * len(layers) // 4], layers[len(layers) // 2]
    early = layers[0] if early == late else early
    methods = []
    for subject in shown:
        train = [record for record in subject.run.train if record["step"] <= 2 * ends]
        entry: dict[str, Any] = {**subject.tag, "cold": subject in thresholds and subject.run.warmup_steps == 0}
        for name, layer in (("cutoff", late), ("batch_cutoff", late), ("other_cutoff", early)):
            steps, values = _experts(subject, name.removeprefix("other_"), layer, train)
            entry[name] = np.stack([steps, values[:, 0]], axis=1)
        distances = expert_series(train, "cutoff_distance").get(late)  # not recorded in every run
        entry["cutoff_distance"] = [] if distances is None else np.stack([distances[0], distances[1][:, 0]], axis=1)
        bounded = not subject.rule.looks_ahead
        for name in ("raw_usage", "starvation", "score_std", "gate_std"):
            entry[name] = _mean_of_layers(train, name) if bounded or name.endswith("std") else []
        own = subject.run.warmup_steps
        entry["starvation"] = [[step, share if step > own else math.nan] for step, share in entry["starvation"]]
        methods.append(entry)
    return {"warmup": ends, "layer": late, "other_layer": early, "target": shown[0].run.target, "methods": methods}


def draw_warmup(data: Data, width: float = WIDE) -> Figure:
    """Draw the first steps with and without warmup: cutoffs, usage, starvation, spread of scores and gates."""
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


def say_warmup(data: Data) -> str:
    with_, without = (next(entry for entry in data["methods"] if entry["cold"] == cold) for cold in (False, True))

    def before(entry: Data, name: str) -> float:
        points = array(entry[name])
        return float(np.nanmean(points[points[:, 0] <= data["warmup"], 1]))

    scores = [before(entry, "score_std") for entry in (with_, without)]
    starved = before(without, "starvation")
    lag = ""
    if all(len(entry.get("cutoff_distance", [])) for entry in (with_, without)):
        cold, warm = (before(entry, "cutoff_distance") for entry in (without, with_))
        lag = (
            f"the cutoff of a step's batch lies on average {cold:.2f} and {warm:.2f} from its running mean before that "
            f"step (expert 0 of layer {data['layer']}), and "
        )
    return (
        f"In the first {data['warmup']:,} steps, without warmup and with it, {lag}the standard deviation of an "
        f"expert's scores is {scores[1]:.2f} and {scores[0]:.2f}. Without warmup the lower capacity bound fills "
        f"{percent(starved)} of the places in these steps."
    )


def capacity(material: Material) -> Data:
    """Collect usage before the bounds, saturation and starvation after the longest warmup (paper, Appendix).

    `bounds`: the share of a pool's tokens that an expert gets at least and at most.
    """
    shown = [subject for subject in material.routed if subject.has_bounds and subject.has_cutoffs]
    if not shown:
        raise NotShownError("no run has capacity bounds")
    begin = max(subject.run.warmup_steps for subject in shown)
    methods = []
    for subject in shown:
        interval = subject.run.config["train"]["log_every"]
        train = [record for record in subject.run.train if record["step"] - interval >= begin]
        pool = pool_tokens(subject.run) or subject.rule.num_experts**2
        bounds = subject.rule.load_bounds(pool)
        assert bounds is not None
        if len(train) > 1:
            values = {name: layer_series(train, name) for name in ("raw_usage", "saturation", "starvation")}
            methods.append(
                {
                    **subject.tag,
                    "bounds": [load / pool for load in bounds],
                    "target": subject.run.target,
                    **values,
                }
            )
    if not methods:
        raise NotShownError("no run with capacity bounds was trained beyond its warmup yet")
    return {"methods": methods}


def draw_capacity(data: Data, width: float = WIDE) -> Figure:
    """Draw usage before the bounds, saturation and starvation after warmup; layers dashed, their mean solid."""
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


def say_capacity(data: Data) -> str:
    parts = []
    for entry in data["methods"]:
        means = [
            np.nanmean([y for points in entry[name].values() for _, y in points if y is not None])
            for name in ("raw_usage", "saturation", "starvation")
        ]
        parts.append(
            f"in {entry['method']} an expert's cutoff selects {percent(means[0])} of the tokens on average, "
            f"{percent(entry['target'])} being the target; the upper bound drops {percent(means[1])} of these, and the "
            f"lower bound fills {percent(means[2])} of the places"
        )
    return f"After warmup, {'; '.join(parts)}."


def cutoffs_and_biases(material: Material) -> Data:
    """Collect cutoffs of the rules that have them, and negated biases of those that have these, in the first layer.

    `values`: for each expert, over steps, the number subtracted from its scores before they are compared (paper, Table
    "Conceptual connections").
    """
    methods = []
    for subject in material.routed:
        name = "cutoff" if subject.has_cutoffs else "bias"
        found = expert_series(subject.run.train, name)
        if subject.layers[0] in found:
            steps, values = _thinned(*found[subject.layers[0]])
            methods.append(
                {**subject.tag, "of": name, "steps": steps, "values": (-values if name == "bias" else values).T}
            )
    if {entry["of"] for entry in methods} != {"bias", "cutoff"}:
        names = [str(entry["method"]) for entry in methods]
        kind = {"bias": "biases", "cutoff": "cutoffs"}[str(methods[0]["of"])] if methods else ""
        recorded = f"these runs recorded only the {kind} of {listed(names)}" if methods else "no run recorded either"
        raise NotShownError(f"it compares cutoffs with biases, and {recorded}")
    return {"layer": material.routed[0].layers[0], "methods": methods}


def draw_cutoffs_and_biases(data: Data, width: float = WIDE) -> Figure:
    """Draw the cutoff or negated bias of each expert over steps, a panel for each method, a colour for each expert."""
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


def say_cutoffs_and_biases(data: Data) -> str:
    parts = []
    for entry in data["methods"]:
        steps, values = array(entry["steps"]), array(entry["values"])
        half = np.searchsorted(steps, steps[-1] / 2)
        drift = np.nanmean(np.abs(values[:, -1] - values[:, half]))
        parts.append(f"{entry['method']} {drift:.2f}")
    return (
        f"In layer {data['layer']}, the cutoff or bias of an expert moved in the second half of training by a mean of "
        f"{listed(parts)}."
    )


def score_histograms(material: Material) -> Data:
    """Compute histograms of all and of assigned scores, of the first layer's first expert and the last layer's last."""
    methods = []
    for subject in material.routed:
        trace = material.trace(subject)
        shown = []
        for layer, expert in ((trace.layers[0], 0), (trace.layers[-1], subject.run.rule["num_experts"] - 1)):
            scores, taken = trace.scores(layer)[:, expert].numpy(), trace.assignment(layer)[:, expert].numpy()
            edges = np.histogram_bin_edges(scores, bins=60)
            cutoffs = subject.rule.thresholds(trace.state(layer))
            deviation = (scores - scores.mean()) / max(scores.std(), 1e-12)
            shown.append(
                {
                    "layer": layer,
                    "expert": expert,
                    "edges": edges,
                    "all": np.histogram(scores, edges)[0],
                    "assigned": np.histogram(scores[taken], edges)[0],
                    "cutoff": None if cutoffs is None else float(cutoffs[expert]),
                    "skewness": float((deviation**3).mean()),
                }
            )
        methods.append({**subject.tag, "tokens": len(trace), "experts": shown})
    return {"methods": methods}


def draw_score_histograms(data: Data, width: float = WIDE) -> Figure:
    """Draw the share of tokens by score, logarithmic; filled: assigned tokens; dashed: the threshold."""
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


def say_score_histograms(data: Data) -> str:
    parts = [
        f"{entry['method']} {' and '.join(signed(each['skewness'], 2) for each in entry['experts'])}"
        for entry in data["methods"]
    ]
    has_line = any(each["cutoff"] is not None for entry in data["methods"] for each in entry["experts"])
    line = "; the dashed line is the score that a token has to exceed" if has_line else ""
    return (
        f"The two distributions of each method have a skewness, positive where the right tail is heavier, of "
        f"{listed(parts)}. Filled bars are the assigned tokens{line}."
    )


def _experts(
    subject: Subject, key: str, layer: int, train: Sequence[Record] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return steps (points,) and values (points, experts) of a layer. Raises NotShownError if not recorded."""
    found = expert_series(subject.run.train if train is None else train, key)
    if layer not in found:
        raise NotShownError(f"{key} of {subject.method} was not recorded")
    return _thinned(*found[layer])


def _thinned(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    chosen = np.linspace(0, len(steps) - 1, min(len(steps), POINTS)).round().astype(int)
    return steps[chosen], values[chosen]


def _mean_of_layers(train: Sequence[Record], key: str) -> list[list[float]]:
    series = list(layer_series(train, key).values())
    steps = sorted(set.intersection(*({x for x, _ in points} for points in series))) if series else []
    lookups = [dict(points) for points in series]
    return [[step, float(np.nanmean([lookup[step] for lookup in lookups]))] for step in steps]


def _spreads(
    scores: Tensor, sizes: Sequence[int], share: float, context: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the spreads by token, by text and by the law, each (sizes, experts), over the scores' std."""
    generator = torch.Generator().manual_seed(0)
    tokens = len(scores)
    unit = scores.std(0).clamp(min=1e-12).numpy()

    def token_by_token(size: int) -> Tensor:
        return torch.randint(tokens, (size,), generator=generator)

    def by_text(size: int) -> Tensor:
        length = min(size, context)
        windows = torch.randint(tokens // context, (-(-size // length), 1), generator=generator)
        start = torch.randint(context - length + 1, windows.shape, generator=generator)
        return (windows * context + start + torch.arange(length)).flatten()[:size]

    def spread(draw: Callable[[int], Tensor]) -> np.ndarray:
        rows = []
        for size in sizes:
            k = max(round(share * size), 1)
            pools = [kth_largest(scores[draw(size)][None], [k])[0].score[0] for _ in range(POOLS)]
            rows.append(torch.stack(pools).std(0).numpy() / unit)
        return np.stack(rows)

    density = _density_at_cutoff(scores.numpy(), share)
    law = [np.sqrt(share * (1 - share) / size) / density / unit for size in sizes]
    return spread(token_by_token), spread(by_text), np.stack(law)


def _density_at_cutoff(scores: np.ndarray, share: float) -> np.ndarray:
    """Return the density of each expert's scores at their (1 − share)-quantile, by a central difference."""
    step = min(share, 1 - share) / 4
    low, high = np.quantile(scores, [1 - share - step, 1 - share + step], axis=0)
    density: np.ndarray = 2 * step / np.maximum(high - low, 1e-12)
    return density


def _slope(sizes: Sequence[int], spreads: np.ndarray) -> float | None:
    return float(np.polyfit(np.log(sizes), np.log(spreads), 1)[0]) if len(sizes) > 1 else None


FIGURES = [
    Study("cutoff_stability", "Cutoffs", "Cutoffs, loads and capacity bounds",
          cutoff_stability, draw_cutoff_stability, say_cutoff_stability),
    Study("cutoff_law", "Cutoffs", "Spread of cutoffs by pool size",
          cutoff_law, draw_cutoff_law, say_cutoff_law),
    Study("warmup", "Cutoffs", "Warmup dynamics",
          warmup, draw_warmup, say_warmup),
    Study("capacity", "Cutoffs", "Capacity behaviour",
          capacity, draw_capacity, say_capacity),
    Study("cutoffs_and_biases", "Cutoffs", "Cutoffs against biases",
          cutoffs_and_biases, draw_cutoffs_and_biases, say_cutoffs_and_biases),
    Study("score_histograms", "Cutoffs", "Score histograms",
          score_histograms, draw_score_histograms, say_score_histograms),
]  # fmt: skip

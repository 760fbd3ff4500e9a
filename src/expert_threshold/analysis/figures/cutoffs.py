"""Cutoffs: their stability compared with loads, their warmup, and the effect of capacity bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..material import Material
from ..plain import Data, NotShownError, array
from ..records import Record, Run, expert_series, layer_series
from ..sentences import each, listed, of_deviation, percent
from .plot import expert_key, expert_lines, mark_warmup, marker, method_strokes, panels, step_axis, thin
from .study import Study, over_methods
from .style import MUTED, ONE_LAYER, TARGET, WARMUP, WIDE, Figure, strokes


def cutoff_stability(material: Material) -> Data:
    """Collect cutoffs and loads in training for the largest pool and for a rule that trains by running means.

    See the paper, Cutoff vs Expert Usage. All values are over steps. For each expert of the middle layer: `deviation`,
    the batch cutoff minus the running mean at the start of the step, and `load`, divided by the target load.
    `distance`: mean |`deviation`| over experts and the last quarter of the steps. Over all layers: `bound`, the share
    of experts whose load a capacity bound changed at any step of a line of the log, and its mean, `bound_share`. Both
    are None without bounds, and `bound` is NaN during warmup.
    """
    choice, thresholds = _by_cutoff(material)
    return over_methods([*choice, *thresholds[:1]], _stability)


def _stability(run: Run) -> Data:
    layer = run.layers[len(run.layers) // 2]
    steps, means = _experts(run, "cutoff", layer)
    deviation = _experts(run, "batch_cutoff", layer)[1] - means
    bound, (logged, distances) = _at_bounds(run), expert_series(run.train, "cutoff_distance")[layer]
    return {
        "layer": layer,
        "warmup": run.warmup_steps,
        "steps": steps,
        "deviation": deviation.T,
        "distance": np.nanmean(distances[logged > 0.75 * logged[-1]]),
        "load": _experts(run, "usage", layer)[1].T / run.target,
        "bound": None if bound is None else thin(bound, bound)[0],
        "bound_share": None if bound is None or np.isnan(bound).all() else np.nanmean(bound),
        "score_std": np.nanmean(_experts(run, "score_std", layer)[1][-10:]),
        "interval": run.config["train"]["log_every"],
    }


def _by_cutoff(material: Material) -> tuple[list[Run], list[Run]]:
    """Return the methods with cutoffs: the one with the largest pool that looks ahead in training, if any, as a list,
    and all methods that train by the cutoffs.
    """
    found = [run for run in material.routed if run.has_cutoffs]
    if not found:
        raise NotShownError("no run has cutoffs")
    choices = sorted((s for s in found if s.rule.looks_ahead), key=lambda s: s.pool or 0)
    return choices[-1:], [s for s in found if not s.rule.looks_ahead]


def _at_bounds(run: Run) -> np.ndarray | None:
    """Return the share of all experts that are at a capacity bound, for each line of the log, or NaN during warmup."""
    if not run.has_bounds:
        return None
    train, interval = run.train, run.config["train"]["log_every"]
    dropped, filled = (expert_series(train, key) for key in ("saturation", "starvation"))
    if not dropped.keys() == filled.keys() == set(run.layers):
        return None  # not recorded
    steps = next(iter(dropped.values()))[0]
    at_bound = [np.maximum(dropped[layer][1], filled[layer][1]) for layer in dropped]
    moved = np.concatenate(at_bound, axis=1)
    share = np.where(np.isfinite(moved).any(1), np.nansum(moved > 0, axis=1) / moved.shape[1], np.nan)
    # A line covers the `interval` steps up to and including its own.
    return np.where(steps - interval >= run.warmup_steps, share, np.nan)


def draw_cutoff_stability(data: Data) -> Figure:
    """Draw batch cutoffs minus their running mean, loads, and experts at a capacity bound over steps.

    Bands cover all experts of the layer. Lines show expert 0, or in the last panel the share of experts in all layers.
    """
    methods = data["methods"]
    where = f"layer {methods[0]['layer']}"
    titles = {
        "deviation": (f"batch cutoff minus its running mean, {where} (score)", 1),
        "load": (f"load as a share of the target load, {where} (%)", 100),
    }
    if any(entry["bound"] is not None for entry in methods):
        titles["bound"] = ("experts at a capacity bound, all layers (%)", 100)
    texts = [title for title, _ in titles.values()]
    figure, every = panels(WIDE, texts, 1.3, columns=1, share=False, key=method_strokes(methods))
    for axes, (name, (_, unit)) in zip(every, titles.items(), strict=True):
        late = []
        for entry, stroke in zip(methods, strokes(methods), strict=True):
            if entry[name] is None:
                continue
            steps, values = array(entry["steps"]), unit * np.atleast_2d(array(entry[name]))
            known = np.isfinite(values).any(axis=0)
            low, high = (edge(values[:, known], axis=0) for edge in (np.nanmin, np.nanmax))
            axes.fill_between(steps[known], low, high, color=stroke["color"], alpha=0.2, linewidth=0)
            axes.plot(steps, values[0], **stroke, linewidth=1.1, **marker(int(known.sum())))
            settled = steps[known] > 0.25 * steps[-1]
            late += [*low[settled], *high[settled]]
        if late:  # the first quarter may be out of view
            low, high = min(late), max(late)
            room = 0.08 * (high - low) or max(abs(high), 1) / 2
            axes.set_ylim(-0.3 * room if name == "bound" else low - room, high + room)
        ends = [entry["steps"][place] for entry in methods for place in (0, -1)]
        axes.set_xlim(min(ends) - 0.5, max(ends) + 0.5)
        step_axis(axes)
        mark_warmup(axes, max(entry["warmup"] for entry in methods), labelled=axes is every[0])
    every[1].axhline(100, **TARGET)
    return figure


def say_cutoff_stability(data: Data) -> str:
    def clause(entry: Data) -> str:
        late = array(entry["steps"]) > 0.75 * entry["steps"][-1]
        apart = percent(float(np.nanmean(np.abs(array(entry["load"])[:, late] - 1))))
        return (
            f"the batch cutoffs of {entry['method']} lie {entry['distance']:.3f} from their running means"
            f"{of_deviation(entry['distance'], entry['score_std'])}, and its loads {apart} from the target load"
        )

    methods = data["methods"]
    clauses = "; ".join(map(clause, methods))
    text = f"Over the last quarter of the steps in layer {methods[0]['layer']}, on average, {clauses}."
    every = max(entry["interval"] for entry in methods)
    if every > 1:
        text += f" Each point, and each of these loads, is the mean of {every} steps."
    bounds = {entry["method"]: entry["bound_share"] for entry in methods if entry["bound_share"] is not None}
    if not bounds:
        return text
    what = "steps and experts" if every == 1 else f"experts and intervals of {every} steps, in at least one step"
    shares = listed([f"{percent(share)} of {what} in {method}" for method, share in bounds.items()])
    return f"{text} After warmup, a capacity bound changed the load in {shares}."


def warmup(material: Material) -> Data:
    """Collect the first steps with warmup, without it, and with the largest pool (paper, Warmup).

    Starvation counts tokens that the lower bound fills in, which it does not do during warmup.
    """
    choice, thresholds = _by_cutoff(material)
    if len({run.warmup_steps > 0 for run in thresholds}) < 2:
        raise NotShownError(
            "it needs a rule that trains by running means of cutoffs, both with a warmup and with --rule.warmup-steps 0"
        )
    shown = thresholds + choice
    ends = max(run.warmup_steps for run in thresholds)
    layers = shown[0].layers
    late, early = layers[3 * len(layers) // 4], layers[len(layers) // 2]
    early = layers[0] if early == late else early

    def compute(run: Run) -> Data:
        train = [record for record in run.train if record["step"] <= 2 * ends]
        entry: dict[str, Any] = {"cold": run in thresholds and run.warmup_steps == 0}
        for name in ("cutoff", "batch_cutoff", "cutoff_distance", "other_cutoff"):
            layer = early if name == "other_cutoff" else late
            steps, values = _experts(run, name.removeprefix("other_"), layer, train)
            entry[name] = np.stack([steps, values[:, 0]], axis=1)
        bounded = not run.rule.looks_ahead
        for name in ("raw_usage", "starvation", "score_std", "gate_std"):
            entry[name] = _mean_of_layers(train, name) if bounded or name.endswith("std") else []
        own = run.warmup_steps
        entry["starvation"] = [[step, share if step > own else math.nan] for step, share in entry["starvation"]]
        return entry

    methods = [{**run.tag, **compute(run)} for run in shown]  # all of them or none, since it compares them
    return {"warmup": ends, "layer": late, "other_layer": early, "target": shown[0].target, "methods": methods}


def draw_warmup(data: Data) -> Figure:
    methods = data["methods"]
    faint: dict[str, Any] = {"color": MUTED, "alpha": 0.5, "linewidth": 0.8}
    key = {**method_strokes(methods), "batch cutoff": faint, "target": TARGET, "warmup ends": WARMUP}
    shown = [
        ("cutoff", f"(a) layer {data['layer']}, cutoff (score)", 1),
        ("raw_usage", "(b) usage before bounds (%)", 100),
        ("starvation", "(c) starvation (%)", 100),
        ("score_std", "(d) std of scores", 1),
        ("gate_std", "(e) std of gates", 1),
    ]
    if data["other_layer"] != data["layer"]:
        shown.append(("other_cutoff", f"(f) layer {data['other_layer']}, cutoff (score)", 1))
    titles = [title for _, title, _ in shown]
    figure, every = panels(WIDE, titles, 1.3, columns=3, share=False, key=key)
    for axes, (name, _, unit) in zip(every, shown, strict=True):
        for entry, stroke in zip(methods, strokes(methods), strict=True):
            points = array(entry[name]).reshape(-1, 2)
            if name == "cutoff":
                batch = array(entry["batch_cutoff"])
                axes.plot(*batch.T, **(faint | {"color": stroke["color"]}))
            axes.plot(points[:, 0], unit * points[:, 1], **stroke, linewidth=1.3)
        step_axis(axes)
        if unit == 100:
            axes.set_ylim(bottom=0)
        axes.axvline(data["warmup"], **WARMUP)
    every[1].axhline(100 * data["target"], **TARGET)
    return figure


def say_warmup(data: Data) -> str:
    with_, without = (next(entry for entry in data["methods"] if entry["cold"] == cold) for cold in (False, True))

    def before(entry: Data, name: str) -> float:
        points = array(entry[name])
        return float(np.nanmean(points[points[:, 0] <= data["warmup"], 1]))

    lag, spread = (
        " and ".join(f"{before(entry, name):.2f}" for entry in (without, with_))
        for name in ("cutoff_distance", "score_std")
    )
    return (
        f"In the first {data['warmup']:,} steps, without warmup and with it, the cutoff of a batch lies on average "
        f"{lag} from its running mean before that step (expert 0 of layer {data['layer']}), and the standard "
        f"deviation of an expert's scores is {spread}. Without warmup the lower capacity bound fills "
        f"{percent(before(without, 'starvation'))} of the target load in these steps."
    )


def capacity(material: Material) -> Data:
    """Collect usage before the bounds, saturation and starvation after the longest warmup (paper, Appendix)."""
    shown = [run for run in material.routed if run.has_bounds and run.has_cutoffs]
    if not shown:
        raise NotShownError("no run has capacity bounds")
    begin = max(run.warmup_steps for run in shown)

    def compute(run: Run) -> Data:
        interval = run.config["train"]["log_every"]
        train = [record for record in run.train if record["step"] - interval >= begin]
        if len(train) < 2:
            raise NotShownError("it has not been trained beyond the longest warmup yet")
        values = {name: layer_series(train, name) for name in ("raw_usage", "saturation", "starvation")}
        return {"target": run.target, **values}

    return over_methods(shown, compute)


def draw_capacity(data: Data) -> Figure:
    """Draw usage before the bounds, saturation and starvation after warmup. Layers are dashed; their mean is solid."""
    methods = data["methods"]
    several = any(len(entry["raw_usage"]) > 1 for entry in methods)
    key = {**({"one layer": ONE_LAYER} if several else {}), **method_strokes(methods), "target": TARGET}
    titles = {"raw_usage": "usage before bounds (%)", "saturation": "saturation (%)", "starvation": "starvation (%)"}
    figure, every = panels(WIDE, list(titles.values()), 1.5, columns=3, share=False, key=key)
    for axes, name in zip(every, titles, strict=True):
        for entry, stroke in zip(methods, strokes(methods), strict=True):
            layers = [array(points) for points in entry[name].values()]
            faint = ONE_LAYER | {"color": stroke["color"], "alpha": 0.4}
            for points in layers if several else []:
                axes.plot(points[:, 0], 100 * points[:, 1], **faint)
            steps = layers[0][:, 0]
            axes.plot(steps, 100 * np.nanmean([points[:, 1] for points in layers], axis=0), **stroke)
        axes.set_ylim(bottom=0)
        step_axis(axes)
    every[0].axhline(100 * methods[0]["target"], **TARGET)
    return figure


def say_capacity(data: Data) -> str:
    def clause(entry: Data) -> str:
        used, dropped, filled = (
            percent(np.nanmean([y for points in entry[name].values() for _, y in points if y is not None]))
            for name in ("raw_usage", "saturation", "starvation")
        )
        return (
            f"in {entry['method']} an expert's cutoff selects {used} of the tokens on average, with a target of "
            f"{percent(entry['target'])}; the upper bound drops {dropped} of these, and the lower bound fills {filled} "
            "of the target load"
        )

    return f"After warmup, {'; '.join(map(clause, data['methods']))}."


def cutoffs_and_biases(material: Material) -> Data:
    """Collect the cutoffs, or the negated biases, of each rule that has them, in the first layer.

    `values`: for each expert, over steps, what is subtracted from its scores before they are compared (paper, Table
    "Conceptual connections").
    """
    methods = []
    for run in material.routed:
        name = "cutoff" if run.has_cutoffs else "bias"
        found = expert_series(run.train, name)
        if run.layers[0] in found:
            steps, values = thin(*found[run.layers[0]])
            methods.append({**run.tag, "of": name, "steps": steps, "values": (-values if name == "bias" else values).T})
    if {entry["of"] for entry in methods} != {"bias", "cutoff"}:
        names = [str(entry["method"]) for entry in methods]
        kind = {"bias": "biases", "cutoff": "cutoffs"}[str(methods[0]["of"])] if methods else ""
        recorded = f"these runs recorded only the {kind} of {listed(names)}" if methods else "no run recorded either"
        raise NotShownError(f"it compares cutoffs with biases, and {recorded}")
    return {"layer": material.routed[0].layers[0], "methods": methods}


def draw_cutoffs_and_biases(data: Data) -> Figure:
    methods = data["methods"]
    titles = [f"{entry['method']}, {'cutoffs' if entry['of'] == 'cutoff' else '− bias'}" for entry in methods]
    colours = [stroke["color"] for stroke in strokes(methods)]
    figure, every = panels(WIDE, titles, 1.4, "", f"score, layer {data['layer']}", colours=colours, least=1.3)
    for axes, entry in zip(every, methods, strict=True):
        expert_lines(axes, array(entry["steps"]), array(entry["values"]).T)
        step_axis(axes)
    expert_key(every, max(len(entry["values"]) for entry in methods))
    return figure


def say_cutoffs_and_biases(data: Data) -> str:
    def drift(entry: Data) -> str:
        steps, values = array(entry["steps"]), array(entry["values"])
        half = np.searchsorted(steps, steps[-1] / 2)
        return f"{np.nanmean(np.abs(values[:, -1] - values[:, half])):.2f}"

    return (
        f"In layer {data['layer']}, the cutoff or bias of an expert changed in the second half of training by a mean "
        f"of {each(data, drift)}."
    )


def _experts(run: Run, key: str, layer: int, train: Sequence[Record] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return steps (points,) and values (points, experts) of a layer. Raises NotShownError if none was recorded."""
    found = expert_series(run.train if train is None else train, key)
    if layer not in found:
        raise NotShownError(f"{key} of {run.method} was not recorded")
    return thin(*found[layer])


def _mean_of_layers(train: Sequence[Record], key: str) -> list[list[float]]:
    """Return the mean over layers at each step at which all layers recorded a number."""
    layers = [dict(points) for points in layer_series(train, key).values()]
    steps = sorted(set.intersection(*map(set, layers))) if layers else []
    return [[step, float(np.nanmean([points[step] for points in layers]))] for step in steps]


FIGURES = [
    Study("cutoff_stability", "Cutoffs", "Cutoffs, loads and capacity bounds",
          cutoff_stability, draw_cutoff_stability, say_cutoff_stability),
    Study("warmup", "Cutoffs", "Warmup dynamics", warmup, draw_warmup, say_warmup),
    Study("capacity", "Cutoffs", "Capacity behaviour", capacity, draw_capacity, say_capacity),
    Study("cutoffs_and_biases", "Cutoffs", "Cutoffs against biases",
          cutoffs_and_biases, draw_cutoffs_and_biases, say_cutoffs_and_biases),
]  # fmt: skip

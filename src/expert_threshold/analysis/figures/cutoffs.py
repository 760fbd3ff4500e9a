"""Cutoffs: their stability compared with loads, their warmup, and the effect of capacity bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..material import Material, Study, over_methods
from ..plain import Data, NotShownError, array
from ..records import Record, Run, expert_series, layer_series, lines_after
from ..sentences import each, listed, of_deviation, percent
from .plot import expert_key, expert_lines, mark_warmup, marker, panels, thin
from .style import MUTED, ONE_LAYER, TARGET, WARMUP, WIDE, Figure, strokes


def cutoff_stability(material: Material) -> Data:
    """Collect cutoffs and loads in training for the largest pool and for a rule that trains by running means.

    See the paper, Cutoff vs Expert Usage. All values are over steps. For each expert of the middle layer: `deviation`,
    the batch cutoff minus the running mean at the start of the step, and `load`, divided by the target load.
    `distance`: mean |`deviation`| over experts and the last quarter of the steps. Over all layers: `bound`, the share
    of experts whose load a capacity bound changed at any step of a line of the log, and its mean, `bound_share`. Both
    are None without bounds, and `bound` is NaN during warmup.
    """

    def compute(run: Run) -> Data:
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
            "interval": max(record["steps"] for record in run.train),
        }

    choice, thresholds = _by_cutoff(material)
    return over_methods([*choice, *thresholds[:1]], compute)


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
    dropped, filled = (expert_series(run.train, key) for key in ("saturation", "starvation"))
    if not run.has_bounds or not dropped.keys() == filled.keys() == set(run.layers):
        return None  # not recorded
    steps, settled = next(iter(dropped.values()))[0], lines_after(run.train, run.warmup_steps)
    moved = np.concatenate([np.maximum(dropped[layer][1], filled[layer][1]) for layer in dropped], axis=1)
    share = np.where(np.isfinite(moved).any(1), np.nansum(moved > 0, axis=1) / moved.shape[1], np.nan)
    return np.where(np.isin(steps, [record["step"] for record in settled]), share, np.nan)


def draw_cutoff_stability(data: Data) -> Figure:
    """Draw batch cutoffs minus their running mean, loads, and experts at a capacity bound over steps.

    Bands cover all experts of the layer. Lines show expert 0, or in the last panel the share of experts in all layers.
    """
    methods = data["methods"]
    where = f"layer {methods[0]['layer']}"
    titles = {
        "deviation": f"batch cutoff minus its running mean, {where} (score)",
        "load": f"load as a share of the target load, {where} (%)",
    }
    if any(entry["bound"] is not None for entry in methods):
        titles["bound"] = "experts at a capacity bound, all layers (%)"
    figure, every = panels(
        WIDE, list(titles.values()), 1.3, columns=1, share=False, counts="step", key=strokes(methods)
    )
    for axes, (name, title) in zip(every, titles.items(), strict=True):
        unit = _unit(title)
        late = []
        for entry, stroke in zip(methods, strokes(methods).values(), strict=True):
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

        def first_expert(name: str, layer: int = late) -> np.ndarray:
            steps, values = _experts(run, name, layer, train)
            return np.stack([steps, values[:, 0]], axis=1)

        bounded, own = not run.rule.looks_ahead, run.warmup_steps
        starvation = _mean_of_layers(train, "starvation") if bounded else []
        return {
            "cold": bounded and own == 0,
            **{name: first_expert(name) for name in ("cutoff", "batch_cutoff", "cutoff_distance")},
            "other_cutoff": first_expert("cutoff", early),
            "raw_usage": _mean_of_layers(train, "raw_usage") if bounded else [],
            "starvation": [[step, share if step > own else math.nan] for step, share in starvation],
            **{name: _mean_of_layers(train, name) for name in ("score_std", "gate_std")},
        }

    methods = [{**run.tag, **compute(run)} for run in shown]  # all of them or none, since it compares them
    return {"warmup": ends, "layer": late, "other_layer": early, "target": shown[0].target, "methods": methods}


def draw_warmup(data: Data) -> Figure:
    methods = data["methods"]
    faint: dict[str, Any] = {"color": MUTED, "alpha": 0.5, "linewidth": 0.8}
    key = {**strokes(methods), "batch cutoff": faint, "target": TARGET, "warmup ends": WARMUP}
    titles = {
        "cutoff": f"(a) layer {data['layer']}, cutoff (score)",
        "raw_usage": "(b) usage before bounds (%)",
        "starvation": "(c) starvation (%)",
        "score_std": "(d) std of scores",
        "gate_std": "(e) std of gates",
        "other_cutoff": f"(f) layer {data['other_layer']}, cutoff (score)",
    }
    if data["other_layer"] == data["layer"]:
        del titles["other_cutoff"]
    figure, every = panels(WIDE, list(titles.values()), 1.3, columns=3, share=False, counts="step", key=key)
    for axes, (name, title) in zip(every, titles.items(), strict=True):
        unit = _unit(title)
        for entry, stroke in zip(methods, strokes(methods).values(), strict=True):
            if name == "cutoff":
                axes.plot(*array(entry["batch_cutoff"]).T, **(faint | {"color": stroke["color"]}))
            steps, values = array(entry[name]).reshape(-1, 2).T
            axes.plot(steps, unit * values, **stroke, linewidth=1.3)
        if unit == 100:
            axes.set_ylim(bottom=0)
        axes.axvline(data["warmup"], **WARMUP)
    every[1].axhline(100 * data["target"], **TARGET)
    return figure


def _unit(title: str) -> int:
    return 100 if title.endswith("(%)") else 1


def say_warmup(data: Data) -> str:
    with_, without = (next(entry for entry in data["methods"] if entry["cold"] == cold) for cold in (False, True))

    def before(entry: Data, name: str) -> float:
        points = array(entry[name])
        return float(np.nanmean(points[points[:, 0] <= data["warmup"], 1]))

    def both(name: str) -> str:
        return f"{before(without, name):.2f} and {before(with_, name):.2f}"

    return (
        f"In the first {data['warmup']:,} steps, without warmup and with it, the cutoff of a batch lies on average "
        f"{both('cutoff_distance')} from its running mean before that step (expert 0 of layer {data['layer']}), and "
        f"the standard deviation of an expert's scores is {both('score_std')}. Without warmup the lower capacity bound "
        f"fills {percent(before(without, 'starvation'))} of the target load in these steps."
    )


def capacity(material: Material) -> Data:
    """Collect usage before the bounds, saturation and starvation after the longest warmup (paper, Appendix)."""
    shown = [run for run in material.routed if run.has_bounds and run.has_cutoffs]
    if not shown:
        raise NotShownError("no run has capacity bounds")
    begin = max(run.warmup_steps for run in shown)

    def compute(run: Run) -> Data:
        train = lines_after(run.train, begin)
        if len(train) < 2:
            raise NotShownError("it has not been trained beyond the longest warmup yet")
        values = {name: layer_series(train, name) for name in ("raw_usage", "saturation", "starvation")}
        return {"target": run.target, **values}

    return over_methods(shown, compute)


def draw_capacity(data: Data) -> Figure:
    """Draw usage before the bounds, saturation and starvation after warmup. Layers are dashed; their mean is solid."""
    methods = data["methods"]
    several = any(len(entry["raw_usage"]) > 1 for entry in methods)
    key = {**({"one layer": ONE_LAYER} if several else {}), **strokes(methods), "target": TARGET}
    titles = {"raw_usage": "usage before bounds (%)", "saturation": "saturation (%)", "starvation": "starvation (%)"}
    figure, every = panels(WIDE, list(titles.values()), 1.5, columns=3, share=False, counts="step", key=key)
    for axes, name in zip(every, titles, strict=True):
        for entry, stroke in zip(methods, strokes(methods).values(), strict=True):
            layers = [array(points).T for points in entry[name].values()]
            for steps, values in layers if several else []:
                axes.plot(steps, 100 * values, **(ONE_LAYER | {"color": stroke["color"], "alpha": 0.4}))
            axes.plot(layers[0][0], 100 * np.nanmean([values for _, values in layers], axis=0), **stroke)
        axes.set_ylim(bottom=0)
    every[0].axhline(100 * methods[0]["target"], **TARGET)
    return figure


def say_capacity(data: Data) -> str:
    def mean(entry: Data, name: str) -> str:
        return percent(np.nanmean([y for points in entry[name].values() for _, y in points if y is not None]))

    def clause(entry: Data) -> str:
        return (
            f"in {entry['method']} an expert's cutoff selects {mean(entry, 'raw_usage')} of the tokens on average, "
            f"with a target of {percent(entry['target'])}; the upper bound drops {mean(entry, 'saturation')} of these, "
            f"and the lower bound fills {mean(entry, 'starvation')} of the target load"
        )

    return f"After warmup, {'; '.join(map(clause, data['methods']))}."


def cutoffs_and_biases(material: Material) -> Data:
    """Collect the cutoffs, or the negated biases, of each rule that has them, in the first layer.

    Either is subtracted from an expert's scores before they are compared (paper, Table "Conceptual connections").
    `values`: (experts, steps).
    """
    methods = []
    for run in material.routed:
        name = "cutoff" if run.has_cutoffs else "bias"
        found = expert_series(run.train, name)
        if run.layers[0] in found:
            steps, values = thin(*found[run.layers[0]])
            methods.append({**run.tag, "of": name, "steps": steps, "values": (-values if name == "bias" else values).T})
    if len({entry["of"] for entry in methods}) < 2:
        names = [str(entry["method"]) for entry in methods]
        kind = "biases" if any(entry["of"] == "bias" for entry in methods) else "cutoffs"
        recorded = f"these runs recorded only the {kind} of {listed(names)}" if methods else "no run recorded either"
        raise NotShownError(f"it compares cutoffs with biases, and {recorded}")
    return {"layer": material.routed[0].layers[0], "methods": methods}


def draw_cutoffs_and_biases(data: Data) -> Figure:
    methods = data["methods"]
    titles = [f"{entry['method']}, {'cutoffs' if entry['of'] == 'cutoff' else '− bias'}" for entry in methods]
    colours = [stroke["color"] for stroke in strokes(methods).values()]
    figure, every = panels(
        WIDE, titles, 1.4, y=f"score, layer {data['layer']}", colours=colours, least=1.3, counts="step"
    )
    for axes, entry in zip(every, methods, strict=True):
        expert_lines(axes, array(entry["steps"]), array(entry["values"]).T)
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
    Study("cutoff_stability", "Cutoffs, loads and capacity bounds",
          cutoff_stability, draw_cutoff_stability, say_cutoff_stability),
    Study("warmup", "Warmup dynamics", warmup, draw_warmup, say_warmup),
    Study("capacity", "Capacity behaviour", capacity, draw_capacity, say_capacity),
    Study("cutoffs_and_biases", "Cutoffs against biases",
          cutoffs_and_biases, draw_cutoffs_and_biases, say_cutoffs_and_biases),
]  # fmt: skip

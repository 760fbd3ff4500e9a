"""Losses by method, and the effect of the pool, the shared expert and the fanout norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby, pairwise
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np

from ...evaluation import read_results
from ...recipes import REFERENCE
from ..material import Material
from ..methods import Subject, options, pool_tokens
from ..plain import Data, NotShownError, array
from ..records import finite, mean_loss, series
from ..results import over_seeds
from ..sentences import counted, listed, pool_size, short, signed
from .axes import (
    NamedLine,
    marker,
    method_panels,
    method_strokes,
    name_lines,
    named_lines,
    panels,
    single,
    tokens_axis,
)
from .study import Study
from .style import INK, KINDS, METHODS, MUTED, NARROW, WIDE, strokes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LATE = 0.9
"""Training losses are averaged over the steps after this share of the run."""


def loss_by_method(material: Material) -> Data:
    """Collect validation losses in nats per token over tokens, as mean and standard deviation over seeds."""
    found = [_curve(runs) for runs in material.compared]
    shown = [entry for entry in found if entry["points"]]
    if not shown:
        raise NotShownError("no run was validated yet")
    return {"methods": shown, "left_out": _without(found, shown, NOT_VALIDATED)}


def draw_losses(data: Data, scale: Callable[[Axes], None] = tokens_axis) -> Figure:
    """Draw the validation loss of each method over tokens, or over what `scale` puts on the x axis.

    Bands are one standard deviation over seeds. Of more than twelve methods, the paper's and the four lowest of the
    others are named, and the rest are grey.
    """
    named, others = _named(data["methods"])
    title = "validation loss (nats per token)"
    return _curves(named, "{:.3f}", title, WIDE, 3.2, scale, others)


def _named(methods: Sequence[Data]) -> tuple[Sequence[Data], Sequence[Data]]:
    """Return the methods to name, and the others, of which there are some only if colours do not suffice."""
    if len(methods) <= len(METHODS):
        return methods, []
    free = [place for place, entry in enumerate(methods) if entry["kind"] not in KINDS]
    last = [points[-1, 1] if len(points) else math.nan for points in map(_points, methods)]
    free.sort(key=lambda place: math.inf if math.isnan(last[place]) else last[place])
    grey = set(free[len(METHODS) - len(KINDS) :])
    return [e for n, e in enumerate(methods) if n not in grey], [e for n, e in enumerate(methods) if n in grey]


def seconds_axis(axes: Axes) -> None:
    axes.set_xlabel("seconds of training", loc="right")
    axes.set_xlim(left=0)


def say_loss_by_method(data: Data) -> str:
    at, ends = _last_shared(data["methods"])
    if at is None:
        parts = [
            f"{entry['points'][-1][1]:.3f} in {entry['method']} after {short(entry['points'][-1][0])} tokens"
            for entry in data["methods"]
        ]
        text = "The methods were not validated at the same step; their last losses, in nats per token, are"
        return f"{text} {listed(parts)}."
    (best, name, _), *others = sorted(ends)
    spreads = [std for *_, std in ends if std is not None]
    seeds = f"the standard deviation over seeds is at most {max(spreads):.3f}" if spreads else ""
    if not others:
        text = f"After {short(at)} tokens the validation loss of {name} is {best:.3f} nats per token"
        return f"{text}; {seeds or 'there is one seed'}."
    text = f"After {short(at)} tokens {name} has the lowest validation loss, {best:.3f} nats per token, followed by"
    gaps = listed([f"{method} ({signed(loss - best)})" for loss, method, _ in others])
    return f"{text} {gaps}; {seeds or 'each has one seed'}."


def _last_shared(methods: Sequence[Data]) -> tuple[float | None, list[tuple[float, str, float | None]]]:
    """Return the last tokens at which all methods were validated, and each one's loss, name and std there."""
    at = [{tokens: place for place, (tokens, _) in enumerate(entry["points"])} for entry in methods]
    shared = max(set.intersection(*map(set, at)), default=None)
    if shared is None:
        return None, []
    places = [each[shared] for each in at]
    return shared, [
        (entry["points"][place][1], entry["method"], entry["std"][place])
        for entry, place in zip(methods, places, strict=True)
    ]


NOT_VALIDATED = "its runs were not validated at a step that all of them share"


def _without(every: Sequence[Data], shown: Sequence[Data], reason: str) -> dict[str, str]:
    """Return the methods that are not shown, with the reason."""
    names = {entry["method"] for entry in shown}
    return {entry["method"]: reason for entry in every if entry["method"] not in names}


def _curve(runs: Sequence[Subject]) -> dict[str, Any]:
    """Return the validation losses of a method's runs at the steps that all of them share."""
    losses = [dict(finite(series(subject.run.validation, "loss"))) for subject in runs]
    steps = sorted(set.intersection(*(set(each) for each in losses)))
    at = [[each[step] for each in losses] for step in steps]
    tokens = runs[0].run.tokens_per_step
    return {
        **runs[0].tag,
        "seeds": len(runs),
        "points": [[step * tokens, fmean(values)] for step, values in zip(steps, at, strict=True)],
        "std": [stdev(values) if len(values) > 1 else None for values in at],
    }


def token_multiple(material: Material) -> Data:
    """Compute the tokens that the reference needs for a loss, divided by the tokens that each method needs for it.

    The reference is `recipes.REFERENCE` if present, else the first method. There is a point for each of its
    validations. Losses are the lowest so far, interpolated linearly between validations.
    """
    every = [_curve(runs) for runs in material.compared]
    curves = [curve for curve in every if len(curve["points"]) > 1]
    if len(curves) < 2:
        raise NotShownError("it compares two methods or more, each validated twice or more")
    reference = next((curve for curve in curves if curve["kind"] == REFERENCE), curves[0])
    methods = []
    for curve in curves:
        if curve is not reference:
            points = [
                [tokens, tokens / needed] for tokens, loss in _lowest(reference) if (needed := _reached(curve, loss))
            ]
            methods.append({"method": curve["method"], "kind": curve["kind"], "points": points})
    shown = [entry for entry in methods if entry["points"]]
    if not shown:
        raise NotShownError(f"no other method came down to a loss of {reference['method']}")
    left_out = _without(every, curves, "it was not validated twice")
    left_out |= _without(methods, shown, f"it never had a loss that {reference['method']} was validated at")
    return {"reference": reference["method"], "methods": shown, "left_out": left_out}


def draw_token_multiple(data: Data) -> Figure:
    """Draw the tokens that the reference needs for a loss over those that each method needs."""
    title = f"tokens of {data['reference']} / tokens, at equal loss"
    figure = _curves(data["methods"], "{:.2f}", title, WIDE, 2, tokens_axis)
    figure.axes[0].axhline(1, color=MUTED, linewidth=0.8)
    figure.axes[0].set_xlabel(f"tokens {data['reference']} was trained on", loc="right")
    return figure


def say_token_multiple(data: Data) -> str:
    ends = sorted(((entry["points"][-1][1], entry["method"]) for entry in data["methods"]), reverse=True)
    parts = [f"{multiple:.2f} times as many tokens as {method}" for multiple, method in ends]
    return f"To reach the last loss that both reach, {data['reference']} needs {listed(parts)}."


def _lowest(curve: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Return (tokens, lowest loss so far)."""
    tokens, losses = zip(*curve["points"], strict=True)
    return list(zip(tokens, np.minimum.accumulate(losses).tolist(), strict=True))


def _reached(curve: Mapping[str, Any], loss: float) -> float | None:
    """Return the tokens at which the curve falls to a loss; None if it never does or began below."""
    points = _lowest(curve)
    for (before, above), (after, below) in pairwise(points):
        if above >= loss > below or above > loss >= below:
            return before + (after - before) * (above - loss) / (above - below)
    return None


def batch_size_scaling(material: Material) -> Data:
    """Collect losses and, where it was measured, CORE, by pool size in training, beside rules without pools."""
    entries = []
    for subjects in material.compared:
        first = subjects[0]
        found = [
            (_late(s), validation[-1][1]) for s in subjects if (validation := finite(series(s.run.validation, "loss")))
        ]
        if first.layers and first.run.has_cutoffs and found:
            entries.append(
                {
                    **first.tag,
                    "pool": pool_tokens(first.run) if first.rule.looks_ahead else None,
                    "train": over_seeds(fmean, [train for train, _ in found]),
                    "validation": fmean(validation for _, validation in found),
                    "core": _evaluated(first).get("core", {}),
                }
            )
    for entry, core in zip(entries, comparable_cores([entry["core"] for entry in entries]), strict=True):
        entry["core"] = core
    pools = {entry["pool"] for entry in entries} - {None}
    if len(pools) < 2:
        raise NotShownError(
            "it needs a rule with cutoffs trained with two sizes of pools: et train --rule expert_choice --pool TOKENS"
        )
    return {"methods": entries}


def comparable_cores(sections: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Return CORE of each `core` of evaluation.json that asked what the first known one did, None for the others."""
    asked = [{name: core.get(name) for name in ("bundle", "max_per_task", "baselines")} for core in sections]
    first = next((mine for core, mine in zip(sections, asked, strict=True) if core.get("metric") is not None), None)
    return [core.get("metric") if mine == first else None for core, mine in zip(sections, asked, strict=True)]


def draw_batch_size_scaling(data: Data) -> Figure:
    """Draw losses over the tokens of the pool, as horizontal lines for methods without pools; CORE below."""
    choice = sorted((entry for entry in data["methods"] if entry["pool"] is not None), key=lambda e: e["pool"])
    threshold = [entry for entry in data["methods"] if entry["pool"] is None]
    measured = any(entry["core"] is not None for entry in data["methods"])
    pools = array([entry["pool"] for entry in choice])
    train, held_out = ({"color": MUTED, "marker": "o"}, {"color": strokes(choice[-1:])[0]["color"], "marker": "o"})
    lines = {f"{name}, validation": stroke for name, stroke in method_strokes(threshold).items()}
    key = {"training, by pool": train, "validation, by pool": held_out} | lines
    titles = ["nats per token", "CORE (%)"][: 1 + measured]
    figure, every = panels(NARROW, titles, 1.9, "tokens of the pool in training", columns=1, share=False, key=key)
    for field, stroke in (("train", train), ("validation", held_out)):
        every[0].plot(pools, array([entry[field] for entry in choice]), **stroke)
    if measured:
        every[1].plot(pools, 100 * array([entry["core"] for entry in choice]), **held_out)
    for entry, line in zip(threshold, lines.values(), strict=True):
        every[0].axhline(entry["validation"], **line)
        if entry["core"] is not None:
            every[1].axhline(100 * entry["core"], **line)
    for axes in every:
        axes.set_xscale("log", base=2)
        axes.set_xticks(pools, [pool_size(entry["pool"]) for entry in choice])
    return figure


def say_batch_size_scaling(data: Data) -> str:
    choice = [entry for entry in data["methods"] if entry["pool"] is not None]
    parts = [f"{entry['validation']:.3f} in {entry['method']}" for entry in choice]
    text = f"By the tokens of the pool the validation loss is {listed(parts)}"
    others = [entry for entry in data["methods"] if entry["pool"] is None]
    threshold = [f"{entry['validation']:.3f} in {entry['method']}" for entry in others]
    return f"{text}; it is {listed(threshold)}." if threshold else f"{text}."


def train_against_validation(material: Material) -> Data:
    """Collect cross-entropy in nats per token over tokens: in training, a running mean, and in validation.

    gap: the last validation loss less the training loss of the last tenth, None if a line of the log is longer;
    pools_gap: where `et evaluate` has measured it, the loss on one text routed causally less that routed by the pools
    of training.
    """
    methods, left_out = [], {}
    for subject in material.first_runs:
        tokens = subject.run.tokens_per_step
        train, validation = (
            [[step * tokens, loss] for step, loss in finite(series(records, key))]
            for records, key in ((subject.run.train, "cross_entropy"), (subject.run.validation, "loss"))
        )
        if not (train and validation):
            left_out[subject.method] = "it was not validated yet"
        else:
            late = _late(subject)
            methods.append(
                {
                    **subject.tag,
                    "train": _running_mean(train),
                    "validation": validation,
                    "gap": None if late is None else validation[-1][1] - late,
                    "pools_gap": _pools_gap(subject),
                }
            )
    if not methods:
        raise NotShownError("no run was validated yet")
    return {"methods": methods, "left_out": left_out}


def draw_train_against_validation(data: Data) -> Figure:
    """Draw each method's training loss, a running mean, and validation loss, over the last two thirds."""
    methods, drawn = data["methods"], strokes(data["methods"])
    causal: dict[str, Any] = {
        "color": INK, "linestyle": (0, (3, 1.5)), "marker": "o", "markersize": 2.5, "linewidth": 1
    }  # fmt: skip
    pools: dict[str, Any] = {
        "color": INK, "linestyle": "none", "marker": "D", "markersize": 4, "markerfacecolor": "none"
    }  # fmt: skip
    key: dict[str, Any] = {"training": {"color": MUTED, "linestyle": "-"}, "validation": causal}
    if any(entry["pools_gap"] is not None for entry in methods):
        key["validation, routed by the pools of training"] = pools
    figure, every = method_panels(WIDE, methods, 1.4, "", "nats per token", key=key)
    seen = []
    for axes, entry, stroke in zip(every, methods, drawn, strict=True):
        train, validation = array(entry["train"]), array(entry["validation"])
        axes.plot(*train.T, **stroke, **marker(len(train)))
        axes.plot(*validation.T, **causal)
        if entry["pools_gap"] is not None:
            axes.plot(validation[-1, 0], validation[-1, 1] - entry["pools_gap"], **pools)
        seen += [y for x, y in (*train, *validation) if x >= train[-1, 0] / 3]
        tokens_axis(axes)
    low, high = np.nanmin(seen), np.nanmax(seen)
    room = 0.06 * (high - low)
    begin = max(array(entry["train"])[-1, 0] for entry in methods) / 3
    every[0].set(xlim=(begin, None), ylim=(low - room, high + room))  # shared
    return figure


def say_train_against_validation(data: Data) -> str:
    gaps, pooled = (
        [f"{signed(entry[name])} ({entry['method']})" for entry in data["methods"] if entry[name] is not None]
        for name in ("gap", "pools_gap")
    )
    text = (
        f"The last validation loss less the mean training loss of the last tenth of the steps is {listed(gaps)}."
        if gaps
        else "The lines of the log are longer than the last tenth of the steps; --log-every makes them shorter."
    )
    if pooled:
        text += f" On one text, routing causally instead of by training's pools changes the loss by {listed(pooled)}."
    return text


def shared_expert(material: Material) -> Data:
    """Collect validation losses with a shared expert, and with one more routed expert instead (Shared Expert)."""
    return _pairs(
        material,
        ("shared_experts", "rule.experts_per_token", "d_expert"),
        lambda run: run["shared_experts"] > 0,
        "it needs a run, and another that differs only in --shared-experts 0 --experts-per-token 2",
    )


def fanout_norm(material: Material) -> Data:
    """Collect validation losses without and with the routed sum divided by the fanout (paper, Normalization)."""
    return _pairs(
        material,
        ("gate_norm",),
        lambda run: run["gate_norm"] is None,
        "it needs a run, and another that differs only in --gate-norm fanout",
    )


def _curves(
    methods: Sequence[Data],
    number: str,
    title: str,
    width: float,
    height: float,
    scale: Callable[[Axes], None],
    others: Sequence[Data] = (),
) -> Figure:
    """Draw a line for each method, named with its last number, and behind them the others in grey."""
    every, behind = ([_points(entry) for entry in each] for each in (methods, others))
    lines = named_lines(methods, [[(x, y) for x, y in points.tolist()] for points in every], number)
    grey: dict[str, Any] = {"color": MUTED, "linewidth": 0.8, "alpha": 0.4}
    key = [*lines, *(NamedLine(counted(len(behind), "other"), points.tolist(), grey) for points in behind[:1])]
    figure, axes = single(width, height, title)
    for points in behind:
        axes.plot(*points.T, **grey)
    for entry, points, line in zip(methods, every, lines, strict=True):
        axes.plot(*points.T, **line.stroke, marker="o", markersize=2.5)
        if any(entry.get("std", [])):
            low, high = (points[:, 1] + sign * array(entry["std"]) for sign in (-1, 1))
            axes.fill_between(points[:, 0], low, high, color=line.stroke["color"], alpha=0.15, linewidth=0)
    scale(axes)
    _trim(axes, [*every, *behind])
    name_lines(axes, key)
    return figure


def _points(entry: Data) -> np.ndarray:
    """Return a method's points, (points, 2), NaN for None."""
    return array(entry["points"]).reshape(-1, 2)


def _trim(axes: Axes, every: Sequence[np.ndarray]) -> None:
    """Set both axes to begin at the second point of lines with three or more, since losses first fall steeply."""
    late = np.concatenate([points[1:] if len(points) > 2 else points for points in every])
    late = late[np.isfinite(late[:, 1])]
    if len(late):
        (left, low), (right, high) = late.min(0), late.max(0)
        room = 0.06 * (high - low) or max(abs(high), 1) / 50
        axes.set_ylim(low - room, high + room)
        room = 0.03 * (right - left) or right / 2
        axes.set_xlim(left - room, right + room)


def say_pairs(cause: str, data: Data) -> str:
    pairs = zip(data["methods"][::2], data["methods"][1::2], strict=True)
    changes = [f"{signed(b['points'][-1][1] - a['points'][-1][1])} ({a['method']})" for a, b in pairs]
    return f"{cause} changes the last validation loss, in nats per token, by {listed(changes)}."


def _pairs(material: Material, free: Sequence[str], has: Callable[[Data], bool], why_not: str) -> Data:
    """Return curves of pairs of methods that differ in the `free` options alone, those that `has` selects first."""

    def rest(runs: Sequence[Subject]) -> str:
        return str({name: value for name, value in options(runs[0].run).items() if name not in free})

    routed = [runs for runs in material.methods.values() if runs[0].layers]
    shown: list[dict[str, Any]] = []
    for _, alike in groupby(sorted(routed, key=rest), rest):
        group = list(alike)
        first = [runs for runs in group if has(options(runs[0].run))]
        second = [runs for runs in group if not has(options(runs[0].run))]
        if first and second:
            curves = [_curve(first[0]), _curve(second[0])]
            if all(curve["points"] for curve in curves):
                shown += curves
    if not shown:
        raise NotShownError(why_not)
    return {"methods": shown}


def _late(subject: Subject) -> float | None:
    """Return the mean training loss over the last tenth of the steps."""
    return mean_loss(subject.run.train, LATE, subject.run.train[-1]["step"]) if subject.run.train else None


def _running_mean(points: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return a debiased exponential mean over a twentieth of the points."""
    decay = 1 - 1 / max(len(points) / 20, 1)
    mean = weight = 0.0
    found = []
    for at, loss in points:
        mean, weight = decay * mean + (1 - decay) * loss, decay * weight + 1 - decay
        found.append([at, mean / weight])
    return found


def _pools_gap(subject: Subject) -> float | None:
    """Return causal loss less loss by training pools, of the same tokens; None if not measured."""
    pooled = _evaluated(subject).get("validation", {}).get("training_pools")
    return None if pooled is None else pooled["causal_loss"] - pooled["loss"]


def _evaluated(subject: Subject) -> dict[str, Any]:
    """Return the results of `et evaluate` for the last checkpoint."""
    return read_results(subject.folder.path, subject.folder.latest_checkpoint())


FIGURES = [
    Study("loss_by_method", "Learning", "Validation loss by method",
          loss_by_method, draw_losses, say_loss_by_method),
    Study("token_multiple", "Learning", "Token multiple at equal loss",
          token_multiple, draw_token_multiple, say_token_multiple),
    Study("batch_size_scaling", "Learning", "Batch size scaling",
          batch_size_scaling, draw_batch_size_scaling, say_batch_size_scaling),
    Study("train_against_validation", "Learning", "Training and validation loss",
          train_against_validation, draw_train_against_validation, say_train_against_validation),
    Study("shared_expert", "Learning", "Shared expert on and off",
          shared_expert, draw_losses, partial(say_pairs, "Leaving out the shared expert")),
    Study("fanout_norm", "Learning", "With and without fanout norm",
          fanout_norm, draw_losses, partial(say_pairs, "The fanout norm")),
]  # fmt: skip

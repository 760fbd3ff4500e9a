"""Losses by method, and the effect of the pool, the shared expert and the fanout norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from statistics import fmean, stdev
from typing import Any

import numpy as np

from ...evaluation import read_results
from ...recipes import REFERENCE
from ..material import Material, Study, over_methods
from ..methods import options
from ..plain import Data, NotShownError, array
from ..records import Run, finite, late_loss, series
from ..results import over_seeds
from ..sentences import counted, each, listed, short, signed
from .plot import draw_key, log2_axis, marker, method_panels, name_lines, panels, single, smooth
from .style import DASHED, INK, KINDS, METHODS, MUTED, NARROW, WIDE, Figure, strokes

TOKENS = "tokens trained on"


def loss_by_method(material: Material) -> Data:
    """Collect validation losses in nats per token over tokens, as mean and standard deviation over seeds."""
    return over_methods(material.first_runs, lambda run: _curve(material.methods[run.method]))


def draw_losses(data: Data, x: str = TOKENS) -> Figure:
    """Draw the validation loss of each method over tokens, or whatever `x` names.

    Bands are one standard deviation over seeds. With more than twelve methods, only the paper's methods and the four
    lowest of the others are named, and the rest are grey.
    """
    named, others = _named(data["methods"])
    return _curves(named, others, "validation loss (nats per token)", "{:.3f}", 3.2, x)


def _named(methods: Sequence[Data]) -> tuple[Sequence[Data], Sequence[Data]]:
    """Return the methods to name, and the methods to draw in grey, for which there are not enough colours."""
    if len(methods) <= len(METHODS):
        return methods, []
    last = {entry["method"]: points[-1, 1] for entry in methods if len(points := _points(entry))}
    free = [entry["method"] for entry in methods if entry["kind"] not in KINDS]
    free.sort(key=lambda name: math.inf if math.isnan(loss := last.get(name, math.nan)) else loss)
    grey = free[len(METHODS) - len(KINDS) :]
    return [e for e in methods if e["method"] not in grey], [e for e in methods if e["method"] in grey]


def say_loss_by_method(data: Data) -> str:
    losses = {entry["method"]: dict(entry["points"]) for entry in data["methods"]}
    last = max(set.intersection(*map(set, losses.values())), default=None)
    if last is None:
        ends = each(data, lambda entry: f"{entry['points'][-1][1]:.3f} after {short(entry['points'][-1][0])} tokens")
        return f"The methods were not validated at the same step; their last losses, in nats per token, are {ends}."
    (best, name), *others = sorted((found[last], method) for method, found in losses.items())
    spreads = [dict(zip(losses[e["method"]], e["std"], strict=True))[last] for e in data["methods"]]
    most = max((std for std in spreads if std is not None), default=None)
    seeds = "each method has one seed" if most is None else f"the standard deviation over seeds is at most {most:.3f}"
    gaps = [f"{method} ({signed(loss - best)})" for loss, method in others]
    followed = f", the lowest, followed by {listed(gaps)}" if gaps else ""
    return f"After {short(last)} tokens {name} has a validation loss of {best:.3f} nats per token{followed}; {seeds}."


def _curve(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the validation losses of a method's runs at their common steps. Raises NotShownError without any."""
    losses = [dict(finite(series(run.validation, "loss"))) for run in runs]
    steps = sorted(set.intersection(*map(set, losses)))
    if not steps:
        raise NotShownError("its runs have no validation step in common")
    at = [[found[step] for found in losses] for step in steps]
    tokens = runs[0].tokens_per_step
    return {
        "seeds": len(runs),
        "points": [[step * tokens, fmean(values)] for step, values in zip(steps, at, strict=True)],
        "std": [stdev(values) if len(values) > 1 else None for values in at],
    }


def token_multiple(material: Material) -> Data:
    """Compute the tokens that the reference needs to reach a loss, divided by the tokens that each method needs.

    The reference is `recipes.REFERENCE` if present, else the first method. There is a point for each validation of the
    reference. Losses are the lowest so far, interpolated linearly between validations.
    """
    found = [run for run in material.first_runs if len(finite(series(run.validation, "loss"))) > 1]
    if len(found) < 2:
        raise NotShownError("it compares two or more methods, each validated at least twice")
    reference = next((run for run in found if run.kind == REFERENCE), found[0])
    tokens, goals = _lowest(_curve(material.methods[reference.method]))

    def compute(run: Run) -> Data:
        needed = _reached(_curve(material.methods[run.method]), goals)
        reached = np.isfinite(needed)
        if not reached.any():
            raise NotShownError(f"it never reached a validation loss of {reference.method}")
        return {"points": np.stack([tokens, tokens / needed], axis=1)[reached]}

    return {"reference": reference.method, **over_methods([s for s in found if s is not reference], compute)}


def draw_token_multiple(data: Data) -> Figure:
    title, x = f"tokens of {data['reference']} / tokens, at equal loss", f"tokens {data['reference']} was trained on"
    figure = _curves(data["methods"], [], title, "{:.2f}", 2, x)
    figure.axes[0].axhline(1, color=MUTED, linewidth=0.8)
    return figure


def say_token_multiple(data: Data) -> str:
    ends = sorted(((entry["points"][-1][1], entry["method"]) for entry in data["methods"]), reverse=True)
    parts = [f"{multiple:.2f} times as many tokens as {method}" for multiple, method in ends]
    return f"To reach the last loss that both reach, {data['reference']} needs {listed(parts)}."


def _lowest(curve: Data) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens and the lowest loss so far at each validation."""
    tokens, losses = np.array(curve["points"]).T
    return tokens, np.minimum.accumulate(losses)


def _reached(curve: Data, losses: Any) -> np.ndarray:
    """Return the tokens at which the curve falls to each loss, or NaN where it never does or starts below it."""
    tokens, lowest = _lowest(curve)
    reached: np.ndarray = np.interp(losses, lowest[::-1], tokens[::-1], np.nan, np.nan)
    return reached


def batch_size_scaling(material: Material) -> Data:
    """Collect losses, and CORE if it was measured, by training pool size, and also those of rules without pools."""
    entries: list[dict[str, Any]] = []
    for runs in material.compared:
        ends = [(late_loss(run.train), finite(series(run.validation, "loss"))[-1:]) for run in runs]
        losses, first = [(train, last[0][1]) for train, last in ends if last], runs[0]
        if first.layers and first.has_cutoffs and losses:
            train, validation = zip(*losses, strict=True)
            pool = first.pool if first.rule.looks_ahead else None
            means = {"train": over_seeds(fmean, train), "validation": fmean(validation)}
            entries.append({**first.tag, "pool": pool, **means, "core": _evaluated(first).get("core", {})})
    for entry, core in zip(entries, comparable_cores([entry["core"] for entry in entries]), strict=True):
        entry["core"] = core
    pools = {entry["pool"] for entry in entries} - {None}
    if len(pools) < 2:
        raise NotShownError(
            "it needs a rule with cutoffs trained with two pool sizes: et train --rule expert_choice --rule.pool TOKENS"
        )
    return {"methods": entries}


def comparable_cores(sections: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Return each section's CORE, or None if it was measured with other settings than the first section's."""
    asked = [{name: core.get(name) for name in ("bundle", "max_per_task", "baselines")} for core in sections]
    first = next((mine for core, mine in zip(sections, asked, strict=True) if core.get("metric") is not None), None)
    return [core.get("metric") if mine == first else None for core, mine in zip(sections, asked, strict=True)]


def draw_batch_size_scaling(data: Data) -> Figure:
    """Draw losses over pool size in tokens, with horizontal lines for methods without pools, and CORE below."""
    choice = sorted((entry for entry in data["methods"] if entry["pool"] is not None), key=lambda e: e["pool"])
    threshold = [entry for entry in data["methods"] if entry["pool"] is None]
    measured = any(entry["core"] is not None for entry in data["methods"])
    pools = [entry["pool"] for entry in choice]
    (largest,) = strokes(choice[-1:]).values()
    train: dict[str, Any] = {"color": MUTED, "marker": "o"}
    held_out = train | {"color": largest["color"]}
    lines = {f"{name}, validation": stroke for name, stroke in strokes(threshold).items()}
    key = {"training, by pool": train, "validation, by pool": held_out} | lines
    titles = ["nats per token", "CORE (%)"][: 1 + measured]
    figure, every = panels(NARROW, titles, 1.9, "tokens of the pool in training", columns=1, share=False, key=key)
    every[0].plot(pools, array([entry["train"] for entry in choice]), **train)
    for axes, (name, unit) in zip(every, (("validation", 1), ("core", 100)), strict=False):
        axes.plot(pools, unit * array([entry[name] for entry in choice]), **held_out)
        for entry, line in zip(threshold, lines.values(), strict=True):
            if entry[name] is not None:
                axes.axhline(unit * entry[name], **line)
        log2_axis(axes, pools)
    return figure


def say_batch_size_scaling(data: Data) -> str:
    groups = [[entry for entry in data["methods"] if (entry["pool"] is None) == free] for free in (False, True)]
    losses = [each({"methods": some}, lambda entry: f"{entry['validation']:.3f}") for some in groups if some]
    return f"By the tokens of the pool the validation loss is {'; it is '.join(losses)}."


def train_against_validation(material: Material) -> Data:
    """Collect cross-entropy in nats per token over tokens: a moving mean in training, and in validation.

    gap: last validation loss minus training loss of the last tenth; None if a line of the log covers more. pools_gap:
    loss with causal routing minus loss with training pools, on the same text, if `et evaluate` has measured it.
    """

    def compute(run: Run) -> Data:
        tokens, late = run.tokens_per_step, late_loss(run.train)
        train = [(step * tokens, loss) for step, loss in finite(series(run.train, "cross_entropy"))]
        validation = [(step * tokens, loss) for step, loss in finite(series(run.validation, "loss"))]
        if not (train and validation):
            raise NotShownError("it has not been validated yet")
        gap = None if late is None else validation[-1][1] - late
        return {"train": smooth(train), "validation": validation, "gap": gap, "pools_gap": _pools_gap(run)}

    return over_methods(material.first_runs, compute)


def draw_train_against_validation(data: Data) -> Figure:
    """Draw the last two thirds of each method's training loss, as a moving mean, and validation loss."""
    causal = DASHED | {"marker": "o", "markersize": 2.5}
    pools: dict[str, Any] = {"color": INK, "linestyle": "none", "marker": "D", "markersize": 4}
    pools["markerfacecolor"] = "none"
    key: dict[str, Any] = {"training": {"color": MUTED, "linestyle": "-"}, "validation": causal}
    if any(entry["pools_gap"] is not None for entry in data["methods"]):
        key["validation, routed by the pools of training"] = pools
    figure, every = method_panels(WIDE, data["methods"], 1.4, "", "nats per token", key=key, counts=TOKENS)
    seen = []
    for axes, entry, stroke in every:
        train, validation = array(entry["train"]), array(entry["validation"])
        axes.plot(*train.T, **stroke, **marker(len(train)))
        axes.plot(*validation.T, **causal)
        if entry["pools_gap"] is not None:
            axes.plot(validation[-1, 0], validation[-1, 1] - entry["pools_gap"], **pools)
        seen += [y for x, y in (*train, *validation) if x >= train[-1, 0] / 3]
    low, high = np.nanmin(seen), np.nanmax(seen)
    room = 0.06 * (high - low)
    begin = max(entry["train"][-1][0] for entry in data["methods"]) / 3
    every[0][0].set(xlim=(begin, None), ylim=(low - room, high + room))  # shared
    return figure


def say_train_against_validation(data: Data) -> str:
    texts = {
        "gap": "The last validation loss minus the mean training loss over the last tenth of the steps is",
        "pools_gap": "On the same text, routing causally instead of by the pools of training changes the loss by",
    }
    none = "Lines of the log cover more than the last tenth of the steps; a smaller --log-every would shorten them."
    said = {"gap": none}
    for name, text in texts.items():
        parts = [f"{signed(entry[name])} ({entry['method']})" for entry in data["methods"] if entry[name] is not None]
        said |= {name: f"{text} {listed(parts)}."} if parts else {}
    return " ".join(said.values())


def _curves(methods: Sequence[Data], others: Sequence[Data], title: str, number: str, height: float, x: str) -> Figure:
    """Draw a line for each method, labelled with its name and last number, in front of the others in grey."""
    figure, axes = single(WIDE, height, title, counts=x)
    grey: dict[str, Any] = {"color": MUTED, "linewidth": 0.8, "alpha": 0.4}
    if others:
        draw_key(figure, {counted(len(others), "other"): grey})
    for entry in others:
        axes.plot(*_points(entry).T, **grey)
    drawn = []
    for entry, stroke in zip(methods, strokes(methods).values(), strict=True):
        points = _points(entry)
        drawn += axes.plot(*points.T, **stroke, marker="o", markersize=2.5)
        if any(entry.get("std", [])):
            low, high = (points[:, 1] + sign * array(entry["std"]) for sign in (-1, 1))
            axes.fill_between(points[:, 0], low, high, color=stroke["color"], alpha=0.15, linewidth=0)
    # Start both axes at the second point of each line with three or more, since losses fall steeply at first.
    every = map(_points, (*methods, *others))
    late = np.concatenate([points[1:] if len(points) > 2 else points for points in every])
    late = late[np.isfinite(late[:, 1])]
    if len(late):
        (left, low), (right, high) = late.min(0), late.max(0)
        room = 0.06 * (high - low) or max(abs(high), 1) / 50
        axes.set_ylim(low - room, high + room)
        room = 0.03 * (right - left) or right / 2
        axes.set_xlim(left - room, right + room)
    name_lines(axes, drawn, number)
    return figure


def _points(entry: Data) -> np.ndarray:
    """Return a method's points, (points, 2), with NaN in place of None."""
    return array(entry["points"]).reshape(-1, 2)


def say_pairs(cause: str, data: Data) -> str:
    pairs = zip(data["methods"][::2], data["methods"][1::2], strict=True)
    changes = [f"{signed(b['points'][-1][1] - a['points'][-1][1])} ({a['method']})" for a, b in pairs]
    return f"{cause} changes the last validation loss, in nats per token, by {listed(changes)}."


def pairs(free: Sequence[str], has: Callable[[Data], bool], needed: str, material: Material) -> Data:
    """Collect validation losses of pairs of methods that differ only in the `free` options.

    has: selects the first of a pair. needed: what the second differs in, as flags.
    """

    def rest(runs: Sequence[Run]) -> str:
        return str({name: value for name, value in options(runs[0]).items() if name not in free})

    routed = [runs for runs in material.methods.values() if runs[0].layers]
    shown: list[dict[str, Any]] = []
    for _, alike in groupby(sorted(routed, key=rest), rest):
        pair = {has(options(runs[0])): runs for runs in reversed(list(alike))}  # the first of each kind
        with suppress(NotShownError):
            if len(pair) == 2:
                shown += [{**pair[first][0].tag, **_curve(pair[first])} for first in (True, False)]
    if not shown:
        raise NotShownError(f"it needs two runs that differ only in {needed}")
    return {"methods": shown}


def _pools_gap(run: Run) -> float | None:
    """Return causal loss minus loss with training pools on the same tokens; None if not measured."""
    pooled = _evaluated(run).get("validation", {}).get("training_pools")
    return None if pooled is None else pooled["causal_loss"] - pooled["loss"]


def _evaluated(run: Run) -> dict[str, Any]:
    """Return the saved results of `et evaluate` for the last checkpoint."""
    return read_results(run.folder.path, run.folder.latest_checkpoint())


FIGURES = [
    Study("loss_by_method", "Validation loss by method", loss_by_method, draw_losses, say_loss_by_method),
    Study("token_multiple", "Token multiple at equal loss", token_multiple, draw_token_multiple, say_token_multiple),
    Study("batch_size_scaling", "Batch size scaling",
          batch_size_scaling, draw_batch_size_scaling, say_batch_size_scaling),
    Study("train_against_validation", "Training and validation loss",
          train_against_validation, draw_train_against_validation, say_train_against_validation),
    # Another routed expert instead of the shared one (paper, Shared Expert).
    Study("shared_expert", "Shared expert on and off",
          partial(pairs, ("model.shared_experts", "rule.experts_per_token", "model.d_expert"),
                  lambda run: run["model.shared_experts"] > 0, "--model.shared-experts 0 --experts-per-token 2"),
          draw_losses, partial(say_pairs, "Leaving out the shared expert")),
    # The routed sum divided by the fanout (paper, Normalization).
    Study("fanout_norm", "With and without fanout norm",
          partial(pairs, ("model.gate_norm",), lambda run: run["model.gate_norm"] is None, "--model.gate-norm fanout"),
          draw_losses, partial(say_pairs, "The fanout norm")),
]  # fmt: skip

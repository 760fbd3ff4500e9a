"""Scores in traces: how rules cut them (paper, Figure 2), the spread of the k-th largest score, and histograms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...routing import kth_largest, take
from ..material import Material, Study, of_each_method
from ..plain import Data, NotShownError, array
from ..records import Run
from ..sentences import each, listed, signed
from .plot import log2_axis, log_ticks, method_panels, panels
from .style import DASHED, GRID, INK, MUTED, SMALL, WIDE, Figure, strokes

SEQUENCES, TOKENS = 3, 16
"""The number of sequences of a trace that are shown, and of tokens of each."""
POOLS = 96
"""The number of pools of each size in which the k-th largest score is measured."""
SMALLEST, LARGEST = 64, 2**15
"""Smallest and largest pool size in tokens. A pool holds at most an eighth of the trace."""


def rules_overview(material: Material) -> Data:
    """Compute one expert's scores for a few tokens of three sequences, and the cutoff of each rule.

    Token choice compares a score with the token's best score from another expert, expert choice with the k-th largest
    score of the sequence or of all shown sequences, and expert threshold with the running mean. k is the target load.
    """
    run = material.focus
    if not run.has_cutoffs:
        raise NotShownError("no run has cutoffs")
    trace = material.trace(run)
    layer = trace.layers[len(trace.layers) // 2]
    windows = len(trace) // trace.context
    length = min(TOKENS, trace.context)
    begin = min(trace.context // 4, trace.context - length)
    if windows < SEQUENCES:
        raise NotShownError(f"it needs a trace of {SEQUENCES * trace.context} tokens or more; use a larger --tokens")
    scores = trace.scores(layer)[: windows * trace.context].view(windows, trace.context, -1)
    scores = scores[:SEQUENCES, begin : begin + length]
    means = run.rule.thresholds(trace.state(layer))
    assert means is not None
    # The expert whose loads by its cutoff and by token choice are closest to the expected load.
    loads = (scores > means).sum((0, 1)), torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).sum((0, 1))
    above, best = ((load - SEQUENCES * length * run.target).abs() for load in loads)
    expert = int((above + best).argmin())
    own = scores[..., expert]
    rival = scores.index_fill(-1, torch.tensor(expert), -torch.inf).amax(-1)

    def rule(kind: str, name: str, cutoff: Tensor, taken: Tensor) -> dict[str, Any]:
        return {"kind": kind, "method": name, "cutoff": cutoff.expand_as(own), "taken": taken}

    def choice(kind: str, name: str, pools: Tensor) -> dict[str, Any]:
        k = max(round(pools.shape[1] * run.target), 1)
        (cut,) = kth_largest(pools[..., None].contiguous(), [k])
        return rule(kind, name, cut.score, take(pools[..., None], cut).view_as(own))

    rules = [
        rule("token_choice", "TC", rival, own > rival),
        choice("expert_choice_sequence", "EC over a sequence", own),
        choice("expert_choice_batch", "EC over a batch", own.reshape(1, -1)),
        rule("expert_threshold", "ET", means[expert], own > means[expert]),
    ]
    return {**run.tag, "layer": layer, "expert": expert, "scores": own, "rules": rules}


def draw_rules_overview(data: Data) -> Figure:
    """Draw a bar for each score, coloured if the token is taken. Dashed: the cutoff; above: the number taken."""
    scores = array(data["scores"])
    sequences, tokens = scores.shape
    place = np.arange(scores.size) + 1.5 * np.repeat(np.arange(sequences), tokens)  # a gap between sequences
    values = np.concatenate([scores, *(array(rule["cutoff"]) for rule in data["rules"])])
    low, high = values.min(), values.max()
    floor, room = low - 0.05 * (high - low), high - low
    key = {"cutoff that scores are compared with": DASHED}
    label = f"score, layer {data['layer']} expert {data['expert']}"
    figure, every = method_panels(WIDE, data["rules"], 1.7, "tokens", label, key=key)
    spans = place.reshape(sequences, tokens)
    for axes, rule, stroke in every:
        taken = np.array(rule["taken"]).ravel()
        for chosen, colour in ((~taken, GRID), (taken, stroke["color"])):
            axes.bar(place[chosen], scores.ravel()[chosen] - floor, bottom=floor, width=0.9, color=colour)
        for span, cutoff, counted in zip(spans, array(rule["cutoff"]), rule["taken"], strict=True):
            axes.stairs(cutoff, np.append(span - 0.5, span[-1] + 0.5), baseline=None, **DASHED)
            axes.text(span.mean(), high + 0.03 * room, sum(counted), ha="center", color=MUTED, fontsize=SMALL)
        axes.tick_params(axis="x", length=0)
        axes.grid(False)
    every[0][0].set_xticks(spans.mean(1), [f"seq. {row + 1}" for row in range(sequences)])  # shared
    every[0][0].set_ylim(floor, high + 0.12 * room)
    return figure


def say_rules_overview(data: Data) -> str:
    tokens = array(data["scores"]).size
    parts = [f"{int(np.sum(rule['taken']))} by {rule['method']}" for rule in data["rules"]]
    return (
        "Each of these rules compares a score with a cutoff. The bars are the scores that expert "
        f"{data['expert']} in layer {data['layer']} of {data['method']} gives to {tokens} tokens of "
        f"{len(data['scores'])} sequences, coloured where the token is taken: {listed(parts)}."
    )


@of_each_method
def cutoff_law(material: Material, run: Run) -> Data:
    """Compute the spread of a pool's k-th largest score by pool size, in standard deviations of the expert's scores.

    Values are root mean squares over experts and layers. Pools are drawn from the trace token by token, and by text: a
    stretch of a window or, for larger pools, whole windows as in training. `slope` is the fitted exponent, −½ under the
    law of 1/√N. `law` is the expected spread for independent tokens, √(p(1 − p)/N) / f(cutoff), where p is an expert's
    share of the tokens and f the density of its scores at the cutoff.
    """
    trace = material.trace(run)
    share = run.target
    if share >= 1:
        raise NotShownError("every expert takes every token")
    smallest = max(SMALLEST, math.ceil(4 / share))
    sizes = [size for power in range(30) if (size := smallest * 2**power) <= min(len(trace) // 8, LARGEST)]
    if len(sizes) < 2:
        raise NotShownError(f"it needs a trace of {16 * smallest} tokens or more; use a larger --tokens")
    if any((scores[:1] == scores).all() for scores in map(trace.scores, trace.layers)):
        raise NotShownError("its scores do not vary")
    found = [_spreads(trace.scores(layer), sizes, share, trace.context) for layer in trace.layers]
    by_token, by_text, law = (np.sqrt(np.mean(np.square(part), axis=(0, 2))) for part in zip(*found, strict=True))
    spreads = {"by_token": by_token, "by_text": by_text, "law": law}
    slopes = {"slope_by_token": _slope(sizes, by_token), "slope_by_text": _slope(sizes, by_text)}
    return {"share": share, "tokens": sizes, **spreads, **slopes}


def draw_cutoff_law(data: Data) -> Figure:
    """Draw the spread of the k-th largest score over pool size, on logarithmic axes. Dashed: independent tokens."""
    methods = data["methods"]
    key = {**strokes(methods), "law of 1/√N": DASHED}
    titles = ["pools of single tokens", "pools of text, as in training"]
    figure, every = panels(WIDE, titles, 2, "tokens in the pool", "std of the k-th score\n/ std of scores", key=key)
    # Methods with the same share and pool sizes should follow the same law, which is drawn once.
    alike: dict[tuple[float, tuple[int, ...]], list[Any]] = {}
    for entry, stroke in zip(methods, strokes(methods).values(), strict=True):
        alike.setdefault((entry["share"], tuple(entry["tokens"])), []).append(array(entry["law"]))
        for axes, name in zip(every, ("by_token", "by_text"), strict=True):
            axes.plot(entry["tokens"], array(entry[name]), **stroke, marker="o", linewidth=1.2)
    for axes in every:
        for (_, tokens), laws in alike.items():
            axes.plot(tokens, np.exp(np.mean(np.log(laws), axis=0)), **DASHED)
    sizes = sorted({size for entry in methods for size in entry["tokens"]})
    ticks = sizes[:: -(-len(sizes) // 6)]
    log2_axis(every[0], ticks, "{:,}".format)  # shared, like the settings below
    every[0].set_yscale("log")
    log_ticks(every[0].yaxis)
    return figure


def say_cutoff_law(data: Data) -> str:
    alone = each(data, lambda entry: signed(entry["slope_by_token"], 2))
    text = each(data, lambda entry: signed(entry["slope_by_text"], 2))
    ratio = np.mean([entry["by_text"][-1] / entry["by_token"][-1] for entry in data["methods"]])
    return (
        "The spread of cutoffs falls as a power of the pool size N, with an exponent of −0.50 by the law of 1/√N. "
        f"Fitted to pools of single tokens it is {alone}; to pools of text, {text}. In the largest pools the spread is "
        f"{ratio:.1f} times as large with text as with single tokens, since neighbouring tokens are not independent."
    )


def _spreads(scores: Tensor, sizes: Sequence[int], share: float, context: int) -> tuple[np.ndarray, ...]:
    """Return the spreads by token, by text and by the law, each (sizes, experts), divided by the std of scores."""
    generator = torch.Generator().manual_seed(0)
    tokens = len(scores)
    unit = scores.std(0).clamp(min=1e-12).numpy()

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

    # The density of each expert's scores at their (1 − share)-quantile, by a central difference.
    step = min(share, 1 - share) / 4
    low, high = np.quantile(scores.numpy(), [1 - share - step, 1 - share + step], axis=0)
    density = 2 * step / np.maximum(high - low, 1e-12)
    law = [np.sqrt(share * (1 - share) / size) / density / unit for size in sizes]
    by_token = spread(lambda size: torch.randint(tokens, (size,), generator=generator))
    return by_token, spread(by_text), np.stack(law)


def _slope(sizes: Sequence[int], spreads: np.ndarray) -> float:
    return float(np.polyfit(np.log(sizes), np.log(spreads), 1)[0])


@of_each_method
def score_histograms(material: Material, run: Run) -> Data:
    """Compute histograms of all and of assigned scores, of the first layer's first expert and the last layer's last."""
    trace = material.trace(run)
    shown = []
    for layer, expert in ((trace.layers[0], 0), (trace.layers[-1], run.rule.num_experts - 1)):
        scores, taken = trace.scores(layer)[:, expert].numpy(), trace.assignment(layer)[:, expert].numpy()
        edges = np.histogram_bin_edges(scores, bins=60)
        cutoffs = run.rule.thresholds(trace.state(layer))
        shown.append(
            {
                "layer": layer,
                "expert": expert,
                "edges": edges,
                "all": np.histogram(scores, edges)[0],
                "assigned": np.histogram(scores[taken], edges)[0],
                "cutoff": None if cutoffs is None else float(cutoffs[expert]),
                "skewness": float((((scores - scores.mean()) / max(scores.std(), 1e-12)) ** 3).mean()),
            }
        )
    return {"tokens": len(trace), "experts": shown}


def draw_score_histograms(data: Data) -> Figure:
    """Draw the share of tokens by score, on a logarithmic axis. Filled: assigned tokens; dashed: the cutoff."""
    shown = [(entry, expert) for entry in data["methods"] for expert in entry["experts"]]
    colours = [stroke["color"] for stroke in strokes(data["methods"]).values() for _ in range(2)]
    titles = [f"{entry['method']}\nlayer {expert['layer']}, expert {expert['expert']}" for entry, expert in shown]
    figure, every = panels(WIDE, titles, 1.2, "score", "% of tokens", colours=colours)
    for axes, (entry, expert), colour in zip(every, shown, colours, strict=True):
        edges = array(expert["edges"])
        scores, assigned = (100 * array(expert[name]) / entry["tokens"] for name in ("all", "assigned"))
        axes.stairs(scores, edges, color=colour, alpha=0.25, fill=True)
        axes.stairs(assigned, edges, color=colour, fill=True)
        axes.stairs(scores, edges, color=colour, linewidth=0.8)
        if expert["cutoff"] is not None:
            axes.axvline(expert["cutoff"], color=INK, linewidth=0.8, linestyle=(0, (2, 1.5)))
    every[0].set_yscale("log")
    every[0].set_ylim(0.5 * 100 / data["methods"][0]["tokens"], None)
    log_ticks(every[0].yaxis)
    return figure


def say_score_histograms(data: Data) -> str:
    skewness = each(data, lambda e: " and ".join(signed(expert["skewness"], 2) for expert in e["experts"]))
    has_line = any(expert["cutoff"] is not None for entry in data["methods"] for expert in entry["experts"])
    line = "; the dashed line is the score that a token has to exceed" if has_line else ""
    return (
        "The skewness of the two distributions of each method, positive if the right tail is heavier, is "
        f"{skewness}. Filled bars are the assigned tokens{line}."
    )


FIGURES = [
    Study("rules_overview", "Overview of rules", rules_overview, draw_rules_overview, say_rules_overview),
    Study("cutoff_law", "Spread of cutoffs by pool size", cutoff_law, draw_cutoff_law, say_cutoff_law),
    Study("score_histograms", "Score histograms", score_histograms, draw_score_histograms, say_score_histograms),
]

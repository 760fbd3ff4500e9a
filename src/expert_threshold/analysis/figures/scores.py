"""Scores in traces: how each rule cuts them (paper, Figure 2), the spread of their k-th largest, their histograms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...routing import kth_largest, take
from ..material import Material
from ..plain import Data, NotShownError, array
from ..sentences import listed, signed
from .axes import log_ticks, method_panels, method_strokes, panels
from .study import Study
from .style import GRID, INK, MUTED, SMALL, WIDE, strokes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SEQUENCES, TOKENS = 3, 16
"""Sequences of a trace, and tokens of each, that are shown."""
POOLS = 96
"""Pools of each size in which the k-th largest score is measured."""
SMALLEST, LARGEST = 64, 2**15
"""Sizes of these pools in tokens; the largest is at most an eighth of the trace."""


def rules_overview(material: Material) -> Data:
    """Compute one expert's scores for a few tokens of three sequences, and the cutoff of each rule.

    Token choice compares with the token's best score from another expert; expert choice with the k-th largest score of
    the sequence or of all sequences shown; expert threshold with the running mean. k is the expert's equal share.
    """
    subject = material.focus
    if not subject.run.has_cutoffs:
        raise NotShownError("no run has cutoffs")
    trace = material.trace(subject)
    layer = trace.layers[len(trace.layers) // 2]
    windows = len(trace) // trace.context
    length = min(TOKENS, trace.context)
    begin = min(trace.context // 4, trace.context - length)
    if windows < SEQUENCES:
        raise NotShownError(f"it needs a trace of {SEQUENCES * trace.context} tokens or more; give more --tokens")
    scores = trace.scores(layer)[: windows * trace.context].view(windows, trace.context, -1)
    scores = scores[:SEQUENCES, begin : begin + length]
    means = subject.rule.thresholds(trace.state(layer))
    assert means is not None
    expert = _ordinary(scores, means, SEQUENCES * length * subject.run.target)
    own = scores[..., expert]
    others = scores.clone()
    others[..., expert] = -torch.inf
    rival = others.amax(-1)

    def kth(pools: Tensor) -> tuple[Tensor, Tensor]:
        k = max(round(pools.shape[1] * subject.run.target), 1)
        (cut,) = kth_largest(pools[..., None].contiguous(), [k])
        return cut.score.expand_as(pools), take(pools[..., None], cut)[..., 0]

    by_sequence, taken_by_sequence = kth(own)
    by_batch, taken_by_batch = (t.view_as(own) for t in kth(own.reshape(1, -1)))
    mean = means[expert].expand_as(own)
    panels = {
        "token_choice": ("TC", rival, own > rival),
        "expert_choice_sequence": ("EC over a sequence", by_sequence, taken_by_sequence),
        "expert_choice_batch": ("EC over a batch", by_batch, taken_by_batch),
        "expert_threshold": ("ET", mean, own > mean),
    }
    rules = [
        {"kind": kind, "method": name, "cutoff": line, "taken": taken} for kind, (name, line, taken) in panels.items()
    ]
    return {**subject.tag, "layer": layer, "expert": expert, "scores": own, "rules": rules}


def _ordinary(scores: Tensor, means: Tensor, expected: float) -> int:
    """Return the expert whose loads by its cutoff and by token choice are nearest to the expected load."""
    experts = scores.shape[-1]
    above = (scores > means).sum((0, 1))
    best = torch.nn.functional.one_hot(scores.argmax(-1), experts).sum((0, 1))
    return int(((above - expected).abs() + (best - expected).abs()).argmin())


def draw_rules_overview(data: Data) -> Figure:
    """Draw a bar for each score, coloured if the token is taken; dashed: the cutoff; above: the number taken."""
    scores = array(data["scores"])
    sequences, tokens = scores.shape
    place = np.arange(scores.size) + 1.5 * np.repeat(np.arange(sequences), tokens)  # a gap between sequences
    cutoffs = [array(rule["cutoff"]) for rule in data["rules"]]
    low = min(scores.min(), *(line.min() for line in cutoffs))
    high = max(scores.max(), *(line.max() for line in cutoffs))
    floor = low - 0.05 * (high - low)
    dashed: dict[str, Any] = {"color": INK, "linewidth": 1, "linestyle": (0, (3, 1.2))}
    key = {"cutoff that scores are compared with": dashed}
    label = f"score, layer {data['layer']} expert {data['expert']}"
    figure, every = method_panels(WIDE, data["rules"], 1.7, "tokens", label, key=key)
    for axes, rule, line, stroke in zip(every, data["rules"], cutoffs, strokes(data["rules"]), strict=True):
        taken = np.array(rule["taken"]).ravel()
        for chosen, colour in ((~taken, GRID), (taken, stroke["color"])):
            axes.bar(place[chosen], scores.ravel()[chosen] - floor, bottom=floor, width=0.9, color=colour)
        for row in range(sequences):
            span = place[row * tokens : (row + 1) * tokens]
            edges = np.append(span - 0.5, span[-1] + 0.5)
            axes.stairs(line[row], edges, baseline=None, **dashed)
            count = f"{int(np.sum(rule['taken'][row]))}"
            axes.text(span.mean(), high + 0.03 * (high - low), count, ha="center", color=MUTED, fontsize=SMALL)
        axes.set_xticks([place[row * tokens : (row + 1) * tokens].mean() for row in range(sequences)])
        axes.set_xticklabels([f"seq. {row + 1}" for row in range(sequences)])
        axes.tick_params(axis="x", length=0)
        axes.grid(False)
    every[0].set_ylim(floor, high + 0.12 * (high - low))
    return figure


def say_rules_overview(data: Data) -> str:
    tokens = array(data["scores"]).size
    parts = [f"{int(np.sum(rule['taken']))} by {rule['method']}" for rule in data["rules"]]
    return (
        "Each of these rules compares a score with a cutoff. The bars are the scores that expert "
        f"{data['expert']} in layer {data['layer']} of {data['method']} gives to {tokens} tokens of "
        f"{len(data['scores'])} sequences, coloured where the token is taken: {listed(parts)}."
    )


def cutoff_law(material: Material) -> Data:
    """Compute the spread of a pool's k-th largest score by pool size, in standard deviations of the expert's scores.

    Values are root mean squares over experts and layers. Pools are drawn from the trace, token by token and by text: a
    stretch of a window or, for larger pools, whole windows as in training. `slope` is the fitted exponent, −½ for the
    law of 1/√N. `law`: √(p(1 − p)/N) / f(cutoff), expected for independent tokens, where p is an expert's share of the
    tokens and f the density of its scores at the cutoff.
    """
    methods: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for subject in material.each("deviation of cutoffs", material.routed):
        trace = material.trace(subject)
        share = subject.run.target
        if share >= 1:
            left_out[subject.method] = "every expert takes every token"
            continue
        smallest = max(SMALLEST, math.ceil(4 / share))
        sizes = [size for power in range(30) if (size := smallest * 2**power) <= min(len(trace) // 8, LARGEST)]
        if len(sizes) < 2:
            left_out[subject.method] = f"it needs a trace of {16 * smallest} tokens or more; give more --tokens"
            continue
        if any((scores[:1] == scores).all() for scores in map(trace.scores, trace.layers)):
            left_out[subject.method] = "its scores do not vary"
            continue
        found = [_spreads(trace.scores(layer), sizes, share, trace.context) for layer in trace.layers]
        by_token, by_text, law = (np.sqrt(np.mean(np.square(part), axis=(0, 2))) for part in zip(*found, strict=True))
        methods.append(
            {
                **subject.tag,
                "share": share,
                "tokens": sizes,
                "by_token": by_token,
                "by_text": by_text,
                "law": law,
                "slope_by_token": _slope(sizes, by_token),
                "slope_by_text": _slope(sizes, by_text),
            }
        )
    if not methods:
        raise NotShownError(next(iter(left_out.values())))
    return {"methods": methods, "left_out": left_out}


def draw_cutoff_law(data: Data) -> Figure:
    """Draw the spread of the k-th largest score over pool size, logarithmic; dashed: independent tokens."""
    methods = data["methods"]
    law: dict[str, Any] = {"color": INK, "linestyle": (0, (3, 1.5)), "linewidth": 1}
    key = {**method_strokes(methods), "law of 1/√N": law}
    titles = ["pools of single tokens", "pools of text, as in training"]
    figure, every = panels(WIDE, titles, 2, "tokens in the pool", "std of the k-th score\n/ std of scores", key=key)
    # Methods with the same share and pool sizes are expected to follow one law, drawn once.
    alike: dict[tuple[float, tuple[int, ...]], list[Any]] = {}
    for entry in methods:
        alike.setdefault((entry["share"], tuple(entry["tokens"])), []).append(array(entry["law"]))
    for axes, name in zip(every, ("by_token", "by_text"), strict=True):
        for entry, stroke in zip(methods, strokes(methods), strict=True):
            axes.plot(entry["tokens"], array(entry[name]), **stroke, marker="o", linewidth=1.2)
        for (_, tokens), laws in alike.items():
            axes.plot(tokens, np.exp(np.mean(np.log(laws), axis=0)), **law)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    sizes = sorted({size for entry in methods for size in entry["tokens"]})
    ticks = sizes[:: -(-len(sizes) // 6)]
    every[0].set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    log_ticks(every[0].yaxis)
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


def _slope(sizes: Sequence[int], spreads: np.ndarray) -> float:
    return float(np.polyfit(np.log(sizes), np.log(spreads), 1)[0])


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


def draw_score_histograms(data: Data) -> Figure:
    """Draw the share of tokens by score, logarithmic; filled: assigned tokens; dashed: the threshold."""
    shown = [(entry, each) for entry in data["methods"] for each in entry["experts"]]
    colours = [stroke["color"] for stroke in strokes(data["methods"]) for _ in range(2)]
    titles = [f"{entry['method']}\nlayer {each['layer']}, expert {each['expert']}" for entry, each in shown]
    figure, every = panels(WIDE, titles, 1.2, "score", "% of tokens", colours=colours)
    for axes, (entry, each), colour in zip(every, shown, colours, strict=True):
        _histogram(axes, each, entry["tokens"], colour)
    every[0].set_yscale("log")
    every[0].set_ylim(0.5 * 100 / data["methods"][0]["tokens"], None)
    log_ticks(every[0].yaxis)
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


FIGURES = [
    Study("rules_overview", "Cutoffs", "Overview of rules",
          rules_overview, draw_rules_overview, say_rules_overview),
    Study("cutoff_law", "Cutoffs", "Spread of cutoffs by pool size",
          cutoff_law, draw_cutoff_law, say_cutoff_law),
    Study("score_histograms", "Cutoffs", "Score histograms",
          score_histograms, draw_score_histograms, say_score_histograms),
]  # fmt: skip

"""The paper's rules applied to the same scores (paper, Figure 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...routing import kth_largest, take
from ..material import Material, NotShownError
from ..plain import Data, array
from ..sentences import listed
from .axes import key, key_room, outer_labels, panels
from .study import Study
from .style import GRID, INK, MUTED, SMALL, WIDE, strokes, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEQUENCES, TOKENS = 3, 16
"""Sequences of a trace, and tokens of each, that are shown."""


def rules_overview(material: Material) -> Data:
    """Compute one expert's scores for a few tokens of three sequences, and the cutoff of each rule.

    Token choice compares with the token's best score from another expert; expert choice with the k-th largest score of
    the sequence or of all sequences shown; expert threshold with the running mean. k is the expert's equal share.
    """
    subject = material.focus
    if not subject.has_cutoffs:
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

    def kth(pools: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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


def _ordinary(scores: torch.Tensor, means: torch.Tensor, expected: float) -> int:
    """Return the expert whose loads by its cutoff and by token choice are nearest to the expected load."""
    experts = scores.shape[-1]
    above = (scores > means).sum((0, 1))
    best = torch.nn.functional.one_hot(scores.argmax(-1), experts).sum((0, 1))
    return int(((above - expected).abs() + (best - expected).abs()).argmin())


def draw_rules_overview(data: Data, width: float = WIDE) -> Figure:
    """Draw a bar for each score, coloured if the token is taken; dashed: the cutoff; above: the number taken."""
    scores = array(data["scores"])
    sequences, tokens = scores.shape
    place = np.arange(scores.size) + 1.5 * np.repeat(np.arange(sequences), tokens)  # a gap between sequences
    cutoffs = [array(rule["cutoff"]) for rule in data["rules"]]
    low = min(scores.min(), *(line.min() for line in cutoffs))
    high = max(scores.max(), *(line.max() for line in cutoffs))
    floor = low - 0.05 * (high - low)
    with style():
        names = ["cutoff that scores are compared with"]
        dashed: dict[str, Any] = {"color": INK, "linewidth": 1, "linestyle": (0, (3, 1.2))}
        figure, every = panels(
            width,
            len(data["rules"]),
            height=1.7,
            left=0.62,
            top=key_room(width, names) + 0.28,
            columns=4 if width > 6 else 2,
        )
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
            axes.set_title(rule["method"], color=stroke["color"])
            axes.set_xticks([place[row * tokens : (row + 1) * tokens].mean() for row in range(sequences)])
            axes.set_xticklabels([f"seq. {row + 1}" for row in range(sequences)])
            axes.tick_params(axis="x", length=0)
            axes.grid(False)
        every[0].set_ylim(floor, high + 0.12 * (high - low))
        outer_labels(every, "tokens", f"score, layer {data['layer']} expert {data['expert']}")
        key(figure, names, [dashed])
    return figure


def say_rules_overview(data: Data) -> str:
    tokens = array(data["scores"]).size
    parts = [f"{int(np.sum(rule['taken']))} by {rule['method']}" for rule in data["rules"]]
    return (
        "Each of these rules compares a score with a cutoff. The bars are the scores that expert "
        f"{data['expert']} in layer {data['layer']} of {data['method']} gives to {tokens} tokens of "
        f"{len(data['scores'])} sequences, coloured where the token is taken: {listed(parts)}."
    )


FIGURES = [
    Study("rules_overview", "Cutoffs", "Overview of rules",
          rules_overview, draw_rules_overview, say_rules_overview),
]  # fmt: skip

"""The rules side by side on the same scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..plain import Data, array
from .axes import key, key_room, outer_labels, panels
from .style import GRID, INK, MUTED, SMALL, WIDE, strokes, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def rules_overview(data: Data, width: float = WIDE) -> Figure:
    """A bar for each token's score, in colour if it is taken; dashed: what it is compared with; how many are taken."""
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

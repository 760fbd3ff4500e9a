"""Figures of how much routing changes between checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..plain import Data, array
from .axes import heat, heat_key, outer_labels, panels
from .style import INK, SMALL, WIDE, strokes, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def routing_consistency(data: Data, width: float = WIDE) -> Figure:
    """Weighted Jaccard between checkpoints, a heatmap for each method."""
    return _heatmaps(data, "weighted_jaccard", width)  # of a checkpoint with itself 1


def routing_divergence(data: Data, width: float = WIDE) -> Figure:
    """Joint Jensen-Shannon divergence between checkpoints in bits, a heatmap for each method."""
    return _heatmaps(data, "joint_jsd", width)  # of a checkpoint with itself 0


def _heatmaps(data: Data, measure: str, width: float) -> Figure:
    methods = data["methods"]
    matrices = [array(entry[measure]) for entry in methods]
    low, high = min(matrix.min() for matrix in matrices), max(matrix.max() for matrix in matrices)
    scale = max(high - low, 1e-9)
    with style():
        alike = all(entry["steps"] == methods[0]["steps"] for entry in methods)
        figure, every = panels(
            width,
            len(methods),
            height=1.55,
            left=0.62,
            right=max(0.75, width - 0.62 - 2.6 * len(methods)),  # cells that are no bands
            least=1.35,
            share=alike,
            titles=[entry["method"] for entry in methods],
        )
        for axes, entry, matrix, stroke in zip(every, methods, matrices, strokes(methods), strict=True):
            heat(axes, 0.05 + 0.75 * (matrix - low) / scale)  # the diagonal on the same scale as the rest
            for (i, j), value in np.ndenumerate(matrix):
                text = f"{value:g}" if i == j else f"{value:.2f}".removeprefix("0")
                axes.text(j, i, text, ha="center", va="center", fontsize=SMALL, color=INK)
            axes.set_title(entry["method"], color=stroke["color"])
            names = [_step(step) for step in entry["steps"]]
            axes.set_xticks(range(len(matrix)), names, fontsize=SMALL, rotation=45)
            axes.set_yticks(range(len(matrix)), names, fontsize=SMALL)
        outer_labels(every, "step", "step")
        heat_key(figure, [(0.05, f"{low:.2f}"), (0.8, f"{high:.2f}")])
    return figure


def _step(step: int) -> str:
    return f"{step / 1000:g}k" if step >= 1000 and step % 100 == 0 else f"{step}"

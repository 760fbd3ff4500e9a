"""Figures of how much routing changes between checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..plain import Data, array
from .axes import heat, heat_key, outer_labels, panels
from .style import INK, WIDE, strokes, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def routing_consistency(data: Data, width: float = WIDE) -> Figure:
    """Weighted Jaccard between checkpoints, a heatmap for each method."""
    return _heatmaps(data, "weighted_jaccard", width)


def routing_divergence(data: Data, width: float = WIDE) -> Figure:
    """Joint Jensen-Shannon divergence between checkpoints in bits, a heatmap for each method."""
    return _heatmaps(data, "joint_jsd", width)


def _heatmaps(data: Data, measure: str, width: float) -> Figure:
    methods = data["methods"]
    matrices = [array(entry[measure]) for entry in methods]
    apart = [matrix[~np.eye(len(matrix), dtype=bool)] for matrix in matrices]
    low, high = min(each.min() for each in apart), max(each.max() for each in apart)
    scale = max(high - low, 1e-9)
    with style():
        alike = all(entry["steps"] == methods[0]["steps"] for entry in methods)
        figure, every = panels(width, len(methods), height=1.55, left=0.62, right=0.75, least=1.5, share=alike)
        for axes, entry, matrix, stroke in zip(every, methods, matrices, strokes(methods), strict=True):
            # The diagonal compares a checkpoint with itself and would take up the scale.
            shares = np.where(np.eye(len(matrix), dtype=bool), np.nan, 0.05 + 0.8 * (matrix - low) / scale)
            heat(axes, shares)
            for i, j in np.argwhere(~np.eye(len(matrix), dtype=bool)):
                text = f"{matrix[i, j]:.2f}".removeprefix("0")
                axes.text(j, i, text, ha="center", va="center", fontsize=6.5, color=INK)
            axes.set_title(entry["method"], color=stroke["color"])
            axes.set_xticks(range(len(matrix)), [_step(step) for step in entry["steps"]], fontsize=7, rotation=45)
            axes.set_yticks(range(len(matrix)), [_step(step) for step in entry["steps"]], fontsize=7)
        outer_labels(every, "step", "step")
        heat_key(figure, [(0.05, f"{low:.2f}"), (0.85, f"{high:.2f}")])
    return figure


def _step(step: int) -> str:
    return f"{step / 1000:g}k" if step >= 1000 and step % 100 == 0 else f"{step}"

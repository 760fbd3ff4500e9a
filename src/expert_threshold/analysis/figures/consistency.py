"""Changes of each token's experts between checkpoints (paper, Routing Consistency Sweep)."""

from __future__ import annotations

from functools import cache, partial
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..material import Material, Study, of_each_method
from ..measures import consistency
from ..plain import Data, NotShownError, array
from ..records import Run
from ..sentences import each
from .plot import colour_scale, heat, method_panels
from .style import INK, SMALL, WIDE, Figure

MOST = 6
"""The maximum number of checkpoints compared, evenly spaced."""


@of_each_method
def routing_consistency(material: Material, run: Run) -> Data:
    """Compute all measures between all pairs of a method's checkpoints on a fixed stream, as (steps, steps) arrays."""
    saved = run.folder.checkpoints()
    steps = [saved[place] for place in np.linspace(0, len(saved) - 1, min(len(saved), MOST)).round().astype(int)]
    if len(steps) < 2:
        raise NotShownError("it compares checkpoints, but the run has only one; train with --checkpoint-every")

    @cache
    def assignment(step: int) -> Tensor:
        trace = material.trace(run, "start", step)
        return torch.stack([trace.assignment(layer) for layer in trace.layers])

    found: dict[str, Any] = {}
    for i, j in combinations_with_replacement(range(len(steps)), 2):
        for name, value in consistency(assignment(steps[i]), assignment(steps[j])).items():
            matrix = found.setdefault(name, np.zeros((len(steps), len(steps))))
            matrix[i, j] = matrix[j, i] = value
    return {"steps": steps, **found}


def draw_matrices(measure: str, data: Data) -> Figure:
    methods = data["methods"]
    values = np.concatenate([array(entry[measure]).ravel() for entry in methods])
    low, high = values.min(), values.max()
    room = max(high - low, 1e-9)
    alike = all(entry["steps"] == methods[0]["steps"] for entry in methods)
    width = min(WIDE, 1.4 + 2.6 * len(methods))  # keeps cells from becoming bands
    figure, every = method_panels(width, methods, 1.55, "step", "step", least=1.35, share=alike)
    for axes, entry, _ in every:
        matrix = array(entry[measure])
        drawn = heat(axes, matrix, low - 0.07 * room, high + 0.26 * room)  # all cells and text stay visible
        for (i, j), value in np.ndenumerate(matrix):
            text = f"{value:g}" if i == j else f"{value:.2f}".removeprefix("0")
            axes.text(j, i, text, ha="center", va="center", fontsize=SMALL, color=INK)
        names = [f"{step / 1000:g}k" if step >= 1000 and step % 100 == 0 else f"{step}" for step in entry["steps"]]
        axes.set_xticks(range(len(matrix)), names, fontsize=SMALL, rotation=45)
        axes.set_yticks(range(len(matrix)), names, fontsize=SMALL)
    colour_scale([axes for axes, *_ in every], drawn, {low: f"{low:.2f}", high: f"{high:.2f}"})
    return figure


def say_matrices(measure: str, name: str, unit: str, same: int, data: Data) -> str:
    """Describe a measure's matrices. same: its value for identical routing."""

    def clause(entry: Data) -> str:
        matrix = array(entry[measure])
        return f"{np.diagonal(matrix, 1).mean():.2f} and {matrix[0, -1]:.2f}{unit}"

    return (
        f"The {name} of successive checkpoints, on average, and of the first and the last is {each(data, clause)}; "
        f"{same} means identical routing."
    )


FIGURES = [
    Study("routing_consistency", "Weighted Jaccard between checkpoints",
          routing_consistency, partial(draw_matrices, "weighted_jaccard"),
          partial(say_matrices, "weighted_jaccard", "weighted Jaccard similarity", "", 1)),
    Study("routing_divergence", "Joint divergence between checkpoints",
          routing_consistency, partial(draw_matrices, "joint_jsd"),
          partial(say_matrices, "joint_jsd", "joint Jensen-Shannon divergence", " bits", 0)),
]  # fmt: skip

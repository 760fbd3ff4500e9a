"""Changes of each token's experts between checkpoints (paper, Routing Consistency Sweep)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..material import Material
from ..measures import dice, jaccard, joint_jsd, total_variation, weighted_dice, weighted_jaccard
from ..methods import Subject
from ..plain import Data, NotShownError, array
from ..sentences import listed
from .axes import heat, heat_key, method_panels
from .study import Study
from .style import INK, SMALL, WIDE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURES: dict[str, Callable[[Tensor, Tensor], float]] = {
    measure.__name__: measure
    for measure in (weighted_jaccard, weighted_dice, jaccard, dice, joint_jsd, total_variation)
}
MOST = 6
"""The most checkpoints compared, evenly chosen."""


def routing_consistency(material: Material) -> Data:
    """Compute every measure between any two checkpoints of a method over a fixed stream, as matrices (steps, steps)."""
    chosen = [(subject, _chosen(subject.folder.checkpoints())) for subject in material.routed]
    several = [(subject, steps) for subject, steps in chosen if len(steps) > 1]
    methods = [
        {**subject.tag, "steps": steps, **_matrices(material, subject, steps)}
        for subject, steps in material.each("routing consistency", several)
    ]
    if not methods:
        raise NotShownError("it compares a run's checkpoints, and these have one each; train with --checkpoint-every")
    left_out = {subject.method: "the run has one checkpoint" for subject, steps in chosen if len(steps) < 2}
    return {"methods": methods, "left_out": left_out}


def draw_matrices(measure: str, data: Data) -> Figure:
    """Draw a measure between any two checkpoints, a heatmap for each method."""
    methods = data["methods"]
    matrices = [array(entry[measure]) for entry in methods]
    low, high = min(matrix.min() for matrix in matrices), max(matrix.max() for matrix in matrices)
    scale = max(high - low, 1e-9)
    alike = all(entry["steps"] == methods[0]["steps"] for entry in methods)
    width = min(WIDE, 1.4 + 2.6 * len(methods))  # keeps cells from becoming bands
    figure, every = method_panels(width, methods, 1.55, "step", "step", least=1.35, share=alike)
    for axes, entry, matrix in zip(every, methods, matrices, strict=True):
        heat(axes, 0.05 + 0.75 * (matrix - low) / scale)  # the diagonal on the same scale as the rest
        for (i, j), value in np.ndenumerate(matrix):
            text = f"{value:g}" if i == j else f"{value:.2f}".removeprefix("0")
            axes.text(j, i, text, ha="center", va="center", fontsize=SMALL, color=INK)
        names = [_step(step) for step in entry["steps"]]
        axes.set_xticks(range(len(matrix)), names, fontsize=SMALL, rotation=45)
        axes.set_yticks(range(len(matrix)), names, fontsize=SMALL)
    heat_key(every, [(0.05, f"{low:.2f}"), (0.8, f"{high:.2f}")])
    return figure


def _step(step: int) -> str:
    return f"{step / 1000:g}k" if step >= 1000 and step % 100 == 0 else f"{step}"


def say_matrices(measure: str, name: str, unit: str, same: int, data: Data) -> str:
    """Describe a measure's matrices. same: its value for checkpoints that route alike."""
    parts = []
    for entry in data["methods"]:
        matrix = array(entry[measure])
        parts.append(f"{np.diagonal(matrix, 1).mean():.2f} and {matrix[0, -1]:.2f}{unit} in {entry['method']}")
    return (
        f"The {name} of successive checkpoints, on average, and of the first and the last is {listed(parts)}; "
        f"{same} is the same routing."
    )


def _matrices(material: Material, subject: Subject, steps: Sequence[int]) -> dict[str, Any]:
    @cache
    def assignment(step: int) -> Tensor:
        trace = material.trace(subject, "start", step)
        return torch.stack([trace.assignment(layer) for layer in trace.layers])

    found = {name: np.zeros((len(steps), len(steps))) for name in MEASURES}
    for i, j in [*combinations(range(len(steps)), 2), *((i, i) for i in range(len(steps)))]:
        for name, measure in MEASURES.items():
            found[name][i, j] = found[name][j, i] = measure(assignment(steps[i]), assignment(steps[j]))
    return found


def _chosen(steps: Sequence[int]) -> list[int]:
    """Choose at most `MOST` steps evenly, first and last included."""
    places = np.linspace(0, len(steps) - 1, min(len(steps), MOST)).round().astype(int)
    return [steps[place] for place in places]


FIGURES = [
    Study("routing_consistency", "Routing consistency", "Weighted Jaccard between checkpoints",
          routing_consistency, partial(draw_matrices, "weighted_jaccard"),
          partial(say_matrices, "weighted_jaccard", "weighted Jaccard similarity", "", 1)),
    Study("routing_divergence", "Routing consistency", "Joint divergence between checkpoints",
          routing_consistency, partial(draw_matrices, "joint_jsd"),
          partial(say_matrices, "joint_jsd", "joint Jensen-Shannon divergence", " bits", 0)),
]  # fmt: skip

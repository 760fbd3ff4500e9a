"""How much a token's experts change from checkpoint to checkpoint (paper, Routing Consistency Sweep)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..material import Material, NotShownError
from ..measures import dice, jaccard, joint_jsd, total_variation, weighted_dice, weighted_jaccard
from ..methods import Subject
from ..plain import Data, array
from ..sentences import listed

MEASURES: dict[str, Callable[[Tensor, Tensor], float]] = {
    measure.__name__: measure
    for measure in (weighted_jaccard, weighted_dice, jaccard, dice, joint_jsd, total_variation)
}
MOST = 6
"""Checkpoints that are compared, evenly chosen."""


def routing_consistency(material: Material) -> Data:
    """All measures between any two checkpoints of each method, over a fixed stream; matrices (steps, steps)."""
    chosen = [(subject, _chosen(subject.folder.checkpoints())) for subject in material.routed]
    several = [(subject, steps) for subject, steps in chosen if len(steps) > 1]
    methods = [
        {**subject.tag, "steps": steps, **_matrices(material, subject, steps)}
        for subject, steps in material.each("routing consistency", several)
    ]
    if not methods:
        raise NotShownError("it compares checkpoints of a run, and these have one each; train with --checkpoint-every")
    left_out = {subject.method: "the run has one checkpoint" for subject, steps in chosen if len(steps) < 2}
    return {"methods": methods, "left_out": left_out}


def say_routing_consistency(data: Data) -> str:
    ends = [_neighbours_and_ends(entry, "weighted_jaccard") for entry in data["methods"]]
    parts = [f"{near:.2f} and {far:.2f} in {name}" for name, near, far in ends]
    return (
        "The weighted Jaccard similarity of successive checkpoints, on average, and of the first and the last is "
        f"{listed(parts)}; 1 is the same routing."
    )


def say_routing_divergence(data: Data) -> str:
    ends = [_neighbours_and_ends(entry, "joint_jsd") for entry in data["methods"]]
    parts = [f"{near:.2f} and {far:.2f} bits in {name}" for name, near, far in ends]
    return (
        "The joint Jensen-Shannon divergence of successive checkpoints, on average, and of the first and the last is "
        f"{listed(parts)}; 0 is the same routing."
    )


def _neighbours_and_ends(entry: Data, measure: str) -> tuple[str, float, float]:
    matrix = array(entry[measure])
    return entry["method"], float(np.diagonal(matrix, 1).mean()), float(matrix[0, -1])


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
    """`MOST` of the steps, the first and the last among them."""
    places = np.linspace(0, len(steps) - 1, min(len(steps), MOST)).round().astype(int)
    return [steps[place] for place in places]

"""A step of Muon by `muon.cpp`: each matrix is orthogonalized and updated while it is in a core's cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..operator import operator
from . import TILE, available

MOST_ELEMENTS = 2**20  # in a matrix; a larger one does not stay in a core's cache


def applies(weight: Tensor, momentum: Tensor, dtype: torch.dtype) -> bool:
    """Return True if the kernel can update these stacks of matrices (…, rows, columns), with products in `dtype`."""
    rows, columns = weight.shape[-2:]
    fits = rows % TILE == 0 == columns % TILE and rows * columns <= MOST_ELEMENTS
    plain = all(t.is_cpu and t.dtype == torch.float32 and t.is_contiguous() for t in (weight, momentum))
    return fits and plain and dtype == torch.bfloat16 and available()


def step(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    *,
    ns_steps: int,
    coefficients: tuple[float, float, float],
    eps: float,
    momentum: float,
    rate: float,
) -> None:
    """Update W ← W − rate · newton_schulz(Nesterov momentum) for stacks (matrices, rows, columns) float32 of one shape.

    coefficients: of the iteration's polynomial; eps: the smallest norm to divide by.
    """
    muon_step(list(weights), list(grads), list(momenta), ns_steps, list(coefficients), eps, momentum, rate)
    increment_version([*weights, *momenta])  # tells autograd that what it saved of them is stale


@operator("weights", "momenta")
def muon_step(
    weights: list[Tensor],
    grads: list[Tensor],
    momenta: list[Tensor],
    ns_steps: int,
    coefficients: list[float],
    eps: float,
    momentum: float,
    rate: float,
) -> None:
    """Update weights and momenta in place, as `step` does."""

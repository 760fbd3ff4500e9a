"""A step of Muon by `muon.cpp`: each matrix is orthogonalized and updated while it is in a core's cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..operator import operator
from . import TILE, available

PARTS = (None, "rows", "columns", "matrix")  # numbered as in muon.cpp
MOST_ELEMENTS = 2**20  # in a matrix of whole tiles; a larger one does not stay in a core's cache


def applies(weight: Tensor, state: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Return True if the kernel can update these stacks (…, rows, columns) with their state, by products in `dtype`."""
    rows, columns = (-(-side // TILE) * TILE for side in weight.shape[-2:])
    fits = rows * columns <= MOST_ELEMENTS
    plain = all(t.is_cpu and t.dtype == torch.float32 and t.is_contiguous() for t in (weight, *state))
    return fits and plain and dtype == torch.bfloat16 and available()


def step(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    *,
    momentum: float,
    equilibrate: str | None,
    polynomials: Sequence[tuple[float, float, float]],
    safety: float,
    eps: float,
    renormalize: str | None,
    normuon_beta: float,
    least_second_moment: float,
    weight_decay: float,
    cautious: bool,
    rate: float,
) -> None:
    """Update stacks (matrices, rows, columns) float32 of one shape, in the order of `optim.orthogonal`'s functions.

    second_moments: of NorMuon; none without it. polynomials: of the iteration, which begins at a matrix divided by
    safety · norm; eps: the smallest norm to divide by. weight_decay: the share of a weight that a step takes off.
    rate: learning rate with the factor of the shape.
    """
    muon_step(
        list(weights),
        list(grads),
        list(momenta),
        list(second_moments),
        momentum,
        PARTS.index(equilibrate),
        [number for polynomial in polynomials for number in polynomial],
        safety,
        eps,
        PARTS.index(renormalize),
        normuon_beta,
        least_second_moment,
        weight_decay,
        cautious,
        rate,
    )
    increment_version([*weights, *momenta, *second_moments])  # tells autograd that what it saved of them is stale


@operator("weights", "momenta", "second_moments")
def muon_step(
    weights: list[Tensor],
    grads: list[Tensor],
    momenta: list[Tensor],
    second_moments: list[Tensor],
    momentum: float,
    equilibrate: int,
    polynomials: list[float],
    safety: float,
    eps: float,
    renormalize: int,
    normuon_beta: float,
    least_second_moment: float,
    weight_decay: float,
    cautious: bool,
    rate: float,
) -> None:
    """Update weights, momenta and second moments in place, as `step` does."""

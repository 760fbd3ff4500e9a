"""A step of Muon by `muon.cpp`: each matrix is orthogonalized and updated while it is in a core's cache."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import TILE, available, library

MOST_ELEMENTS = 2**20  # in a matrix; a larger one does not stay in a core's cache
FLOAT32 = 4  # bytes


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
    kernels = library()
    assert kernels is not None
    rows, columns = weights[0].shape[-2:]
    grads = [grad.contiguous() for grad in grads]  # kept alive until the kernel returns
    matrices = [_addresses(stacks, rows * columns) for stacks in (weights, grads, momenta)]
    sizes = map(c_int64, (len(matrices[0]), rows, columns, ns_steps))
    numbers = map(c_float, (momentum, rate, *coefficients, eps))
    kernels.et_muon(*((c_void_p * len(m))(*m) for m in matrices), *sizes, *numbers)
    increment_version([*weights, *momenta])  # tells autograd that what it saved of them is stale


def _addresses(stacks: Sequence[Tensor], elements: int) -> list[int]:
    assert all(stack.is_contiguous() for stack in stacks)
    return [stack.data_ptr() + i * elements * FLOAT32 for stack in stacks for i in range(len(stack))]

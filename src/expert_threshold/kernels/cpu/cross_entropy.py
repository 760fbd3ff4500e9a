"""Cross-entropy of a softcapped head by `cross_entropy.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..operator import operator
from . import TILE, available

GROUP = 256  # tokens, as in cross_entropy.cpp
MOST_SOFTCAP = 60.0  # exponentials up to e^60 = 10^26 leave room for sums over any vocabulary
NUMBERS_PER_CHUNK = 1 << 25  # bound on tokens × vocabulary of the gradient factors held at a time, in bfloat16


def applies(x: Tensor, weight: Tensor, softcap: float | None) -> bool:
    """Return True if the kernel can compute the head `weight` (vocab, d_model) on rows like x (tokens, d_model)."""
    tiles = len(x) > 0 and all(size % TILE == 0 < size for size in weight.shape)
    fits = tiles and softcap is not None and 0 < softcap <= MOST_SOFTCAP
    return fits and x.is_cpu and x.dtype == torch.bfloat16 and available()


def cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, softcap: float, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses (tokens,) float32, 0 where the target is -1, and the gradients of their sum by x and weight, up to
    factors of 2 softcap and 4; gradients are empty without `with_gradient`.

    x: (tokens, d_model) bfloat16; weight: (vocab, d_model), its gradient in its dtype; targets: (tokens,).
    Raises IndexError if a target is not in the vocabulary.
    """
    chunk = max(NUMBERS_PER_CHUNK // len(weight) // GROUP, 1) * GROUP
    if int(targets.max()) >= len(weight):
        raise IndexError(f"target {int(targets.max())} must lie below the vocabulary of {len(weight)}")
    scaled = (weight * (2 / softcap)).to(x.dtype)
    losses, dx, dweight = capped_cross_entropy(x, scaled, targets.long(), softcap, chunk, with_gradient)
    return losses, dx, dweight.to(weight.dtype)


@operator()
def capped_cross_entropy(
    x: Tensor, scaled: Tensor, targets: Tensor, softcap: float, chunk: int, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses and gradients as above, from the weight times 2 / softcap. chunk: tokens at a time."""
    raise NotImplementedError

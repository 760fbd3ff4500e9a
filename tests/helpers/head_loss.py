"""The loss of a softcapped head and its gradients, by its definition and as computed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from expert_threshold.model.cross_entropy import linear_cross_entropy
from rounding import HALF_A_UNIT


def by_definition(
    x: Tensor, weight: Tensor, targets: Tensor, softcap: float, upstream: float = 1.0
) -> dict[str, Tensor]:
    """Return the mean over tokens with a target, each token's loss, and the gradients, from materialised logits."""
    x, weight = (t.detach().to(weight.dtype).requires_grad_() for t in (x, weight))
    logits = x @ weight.T
    logits = softcap * torch.tanh(logits / softcap)
    losses = F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")
    mean = losses.sum() / (targets >= 0).sum().clamp(min=1)
    dx, dweight = torch.autograd.grad(upstream * mean, (x, weight))
    return {"mean": mean.detach(), "losses": losses.detach(), "x": dx, "weight": dweight}


def as_computed(x: Tensor, weight: Tensor, targets: Tensor, softcap: float, upstream: float = 1.0) -> dict[str, Tensor]:
    """Return what `linear_cross_entropy` computes of the same."""
    x, weight = (t.detach().clone().requires_grad_() for t in (x, weight))
    mean, losses = linear_cross_entropy(x, weight, targets, softcap)
    dx, dweight = torch.autograd.grad(upstream * mean, (x, weight))
    assert not losses.requires_grad
    return {"mean": mean.detach(), "losses": losses, "x": dx, "weight": dweight}


# A common shift takes all logits to one end of their cap.
SOFTCAPS = (15.0, 40.0, 45.0, 60.0)
SHIFTS = (-400.0, -120.0, -80.0, -40.0, 40.0, 120.0)
TOKENS, WIDTH = 64, 64


def require_the_definition(
    softcap: float, shift: float, dtype: torch.dtype, vocab: int, *, rounded_logits: bool
) -> None:
    """Losses and gradients within the rounding of `dtype`; rounded_logits: to it, too, before the cap."""
    torch.manual_seed(0)
    x = torch.randn(TOKENS, WIDTH)
    scaled = torch.randn(vocab, WIDTH) * 2 / softcap
    x[:, 0], scaled[:, 0] = 4, shift / 4 * 2 / softcap
    x, weight = x.to(dtype), scaled.to(dtype).float() * softcap / 2  # so that it is rounded already
    targets = torch.randint(vocab, (TOKENS,))

    exact = by_definition(x, weight.double(), targets, softcap)
    logits = x.double() @ weight.double().T
    half = HALF_A_UNIT if dtype == torch.bfloat16 else torch.finfo(dtype).eps
    slope = 1 - torch.tanh(logits / softcap) ** 2
    moved = 2 * float((half * logits * slope).abs().max()) * rounded_logits  # differences of capped logits
    bend = half * float((2 * logits / softcap).abs().max()) * rounded_logits  # the slope, relatively
    found = as_computed(x, weight, targets, softcap)
    assert (found["losses"] - exact["losses"]).abs().max() <= moved + 1e-4
    # float32 knows the slope of the cap to a unit in the last place of 1, which is all of it at the ends.
    errors = F.softmax(softcap * torch.tanh(logits / softcap), 1) + F.one_hot(targets, vocab)
    terms = errors * ((moved + bend + 4 * half) * slope + 4 * torch.finfo(torch.float32).eps) / TOKENS
    for name, bound in (("x", terms @ weight.double().abs()), ("weight", terms.T @ x.double().abs())):
        assert (found[name] - exact[name]).norm() <= bound.norm()

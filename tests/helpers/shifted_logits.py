"""A head whose logits a common shift takes to one end of their cap, against the definition in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from expert_threshold.model.cross_entropy import linear_cross_entropy
from rounding import HALF_A_UNIT

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

    inputs = x.double().requires_grad_(), weight.double().requires_grad_()
    logits = inputs[0] @ inputs[1].T
    capped = softcap * torch.tanh(logits / softcap)
    losses = F.cross_entropy(capped, targets, reduction="none")
    exact = torch.autograd.grad(losses.mean(), inputs)

    logits, losses = logits.detach(), losses.detach()
    half = HALF_A_UNIT if dtype == torch.bfloat16 else torch.finfo(dtype).eps
    slope = 1 - torch.tanh(logits / softcap) ** 2
    moved = 2 * float((half * logits * slope).abs().max()) * rounded_logits  # differences of capped logits
    bend = half * float((2 * logits / softcap).abs().max()) * rounded_logits  # the slope, relatively
    x.requires_grad_()
    weight.requires_grad_()
    found = linear_cross_entropy(x, weight, targets, softcap)
    assert (found.token_losses - losses).abs().max() <= moved + 1e-4
    # float32 knows the slope of the cap to a unit in the last place of 1, which is all of it at the ends.
    errors = F.softmax(capped.detach(), 1) + F.one_hot(targets, vocab)
    terms = errors * ((moved + bend + 4 * half) * slope + 4 * torch.finfo(torch.float32).eps) / TOKENS
    bounds = terms @ inputs[1].abs(), terms.T @ inputs[0].abs()
    for gradient, wanted, bound in zip(torch.autograd.grad(found.mean, (x, weight)), exact, bounds, strict=True):
        assert (gradient - wanted).norm() <= bound.norm()

"""Cross-entropy of a softcapped head, in chunks of tokens, so that the logits never exist whole."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..moe.experts import refuse_second_derivative

LOGITS_PER_CHUNK = 1 << 20  # float32 numbers that exist at a time: 4 MiB, and one copy


class CrossEntropy(NamedTuple):
    """mean: differentiable scalar over the tokens whose target is not -1; token_losses: (tokens,), without gradient."""

    mean: Tensor
    token_losses: Tensor


def softcap_logits(logits: Tensor, softcap: float | None) -> Tensor:
    """softcap · tanh(logits / softcap) in float32; None is off."""
    logits = logits.float()
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> CrossEntropy:
    """Cross-entropy in nats of the head `weight` (vocab, d_model) on x (tokens, d_model); targets: (tokens,).

    Targets of -1 are ignored. Gradients are made while the logits of a chunk are at hand, so that memory does not grow
    with tokens × vocab.
    """
    with_gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return CrossEntropy(*_LinearCrossEntropy.apply(x, weight, targets, softcap, with_gradient))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, with_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        cast_weight = weight.to(x.dtype)
        token_losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
        count = (targets >= 0).sum().clamp(min=1)
        dx = torch.empty_like(x) if with_gradient else None
        dweight = torch.zeros_like(weight) if with_gradient else None
        size = max(LOGITS_PER_CHUNK // len(weight), 1)
        for start in range(0, len(x), size):
            chunk = slice(start, start + size)
            wanted = targets[chunk, None]
            valid = wanted >= 0
            logits = (x[chunk] @ cast_weight.T).float()
            if softcap is not None:
                slope = logits.div_(softcap).tanh_()  # the derivative of the cap is 1 - slope², taken below
                logits = slope * softcap
            at_target = logits.gather(1, wanted.clamp(min=0))
            if softcap is None:
                logits -= logits.amax(1, keepdim=True)
                at_target = logits.gather(1, wanted.clamp(min=0))
            probabilities = logits.exp_()  # a cap far below 88 keeps exp within float32
            total = probabilities.sum(1, keepdim=True)
            token_losses[chunk] = ((total.log() - at_target) * valid)[:, 0]
            if dx is None or dweight is None:
                continue
            dlogits = probabilities.mul_(valid / (total * count))
            dlogits.scatter_add_(1, wanted.clamp(min=0), -(valid / count))
            if softcap is not None:
                dlogits.mul_(slope.square_().neg_().add_(1))
            dlogits = dlogits.to(x.dtype)
            torch.mm(dlogits, cast_weight, out=dx[chunk])
            dweight.addmm_(dlogits.T.to(weight.dtype), x[chunk].to(weight.dtype))
        ctx.save_for_backward(dx, dweight)
        ctx.mark_non_differentiable(token_losses)
        return token_losses.sum() / count, token_losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        dx, dweight = ctx.saved_tensors
        return dx * grad.to(dx.dtype), dweight * grad, None, None, None

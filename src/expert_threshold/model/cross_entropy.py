"""Cross-entropy of a softcapped head, computed in chunks of tokens, so that the full logits never exist."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import gpu, refuse_second_derivative
from ..kernels.cpu.blocks import override

# Logits in a chunk: few enough for a CPU's cache, but enough to fill a GPU. They exist three times in float32, or once
# in bfloat16 in the kernel, where fewer chunks also mean fewer additions to the head's gradient.
LOGITS_PER_CHUNK = {"cpu": 1 << 20, "gpu": 1 << 26, "kernel": 1 << 29}


class CrossEntropy(NamedTuple):
    """The differentiable mean over tokens whose targets are not -1, and token_losses (tokens,), without gradient."""

    mean: Tensor
    token_losses: Tensor


def softcap_logits(logits: Tensor, softcap: float) -> Tensor:
    """Return softcap · tanh(logits / softcap) in float32."""
    return softcap * torch.tanh(logits.float() / softcap)


def cross_entropy(logits: Tensor, targets: Tensor) -> CrossEntropy:
    """Return the cross-entropy in nats for logits (tokens, vocab) float32. Targets of -1 are ignored."""
    losses = F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")
    return CrossEntropy(losses.sum() / (targets >= 0).sum().clamp(min=1), losses.detach())


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, softcap: float) -> CrossEntropy:
    """Return the cross-entropy in nats for x (tokens, d_model), a head `weight` (vocab, d_model) and targets (tokens,).

    Targets of -1 are ignored. Gradients are computed along with each chunk's logits, so that memory does not grow with
    tokens × vocab.
    """
    with_gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if not with_gradient and not torch.compiler.is_compiling():  # a data-dependent number of tokens breaks the graph
        kept = (targets >= 0).nonzero()[:, 0]
        if len(kept) < len(x):
            mean, losses = _LinearCrossEntropy.apply(x[kept], weight, targets[kept], softcap, False)
            return CrossEntropy(mean, losses.new_zeros(len(x)).index_copy_(0, kept, losses))
    return CrossEntropy(*_LinearCrossEntropy.apply(x, weight, targets, softcap, with_gradient))


@torch.library.custom_op("expert_threshold::cross_entropy", mutates_args=())
def _cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, softcap: float, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses (tokens,) and the gradients of their sum, up to `ctx.slopes` and empty unless `with_gradient`.

    With σ = sigmoid(2l / cap), cap · tanh(l / cap) is 2 cap · σ minus a constant, which cancels in a softmax; the
    derivative is 4 σ (1 − σ). So one exponential suffices where tanh needs several.
    """
    if (kernel := override("cross_entropy", x, weight, softcap)) is not None:
        found: tuple[Tensor, Tensor, Tensor] = kernel(x, weight, targets, softcap, with_gradient)
        return found
    cast_weight = (weight * (2 / softcap)).to(x.dtype)
    token_losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
    valid = targets >= 0
    wanted = targets.clamp(min=0)
    dx = x.new_empty(x.shape if with_gradient else (0, x.shape[1]))
    dweight = weight.new_zeros(weight.shape if with_gradient else (0, weight.shape[1]))
    on_gpu = gpu.applies(x)
    size = max(LOGITS_PER_CHUNK["kernel" if on_gpu else "cpu" if x.is_cpu else "gpu"] // len(weight), 1)
    # One set of buffers serves all chunks: allocating megabytes for each would fragment the heap.
    shape = (min(size, len(x)), len(weight))
    rounded = x.new_empty(shape)
    wide = [] if on_gpu else [x.new_empty(shape, dtype=torch.float32) for _ in range(3)]
    for start in range(0, len(x), size):
        chunk = slice(start, start + size)
        logits = rounded[: len(x[chunk])]
        torch.mm(x[chunk], cast_weight.T, out=logits)
        if on_gpu:
            from ..kernels.gpu.cross_entropy import softmax_slopes

            softmax_slopes(logits, wanted[chunk], token_losses[chunk], softcap, with_gradient)
        else:
            _softmax_slopes(logits, wanted[chunk], token_losses[chunk], softcap, with_gradient, wide)
        if with_gradient:
            torch.mm(logits, cast_weight, out=dx[chunk])
            _add_product(dweight, logits.T, x[chunk] * valid[chunk, None])
    token_losses *= valid
    return token_losses, dx, dweight


def _softmax_slopes(
    logits: Tensor, wanted: Tensor, losses: Tensor, softcap: float, with_gradient: bool, buffers: list[Tensor]
) -> None:
    """Write the losses (rows,) for logits (rows, vocab). If `with_gradient`, replace the logits by their slopes.

    buffers: three float32 buffers, each with at least as many rows.
    """
    sigma, scores, shares = (buffer[: len(logits)] for buffer in buffers)
    sigma.copy_(logits).sigmoid_()
    torch.mul(sigma, 2 * softcap, out=scores)
    torch.softmax(scores, 1, out=shares)
    # Exponentials are relative to the largest logit, whose probability never underflows.
    below_top = scores.amax(1) - scores.gather(1, wanted[:, None])[:, 0]
    losses.copy_(below_top - shares.amax(1).log())
    if with_gradient:
        shares.scatter_add_(1, wanted[:, None], shares.new_full((1, 1), -1).expand(len(wanted), 1))
        # The factors 2 cap and 2 / cap make 4, applied at the end.
        torch.ops.aten.sigmoid_backward(shares, sigma, grad_input=shares)
        logits.copy_(shares)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`, accumulating in float32 even if a GPU multiplies narrower numbers."""
    if left.is_cuda and left.dtype != total.dtype == torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


@_cross_entropy.register_fake
def _(x: Tensor, weight: Tensor, targets: Tensor, softcap: float, with_gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
    some = slice(None if with_gradient else 0)
    losses = x.new_empty(x.shape[0], dtype=torch.float32)
    return losses, x.new_empty(x[some].shape), weight.new_empty(weight[some].shape)


class _LinearCrossEntropy(torch.autograd.Function):
    """Cross-entropy that computes gradients along with the losses and saves them for backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, softcap: float, with_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        token_losses, dx, dweight = _cross_entropy(x, weight, targets, softcap, with_gradient)
        valid = targets >= 0
        count = valid.sum().clamp(min=1)
        ctx.save_for_backward(dx, dweight, valid, count)
        ctx.slopes = 2 * softcap, 4
        ctx.mark_non_differentiable(token_losses)
        return token_losses.sum() / count, token_losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        dx, dweight, valid, count = ctx.saved_tensors
        slope_x, slope_weight = ctx.slopes
        share = grad / count
        return dx * (share * slope_x * valid[:, None]).to(dx.dtype), dweight * (share * slope_weight), None, None, None

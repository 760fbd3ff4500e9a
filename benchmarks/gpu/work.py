"""FLOPs and bytes of parts of a step, from their shapes: each input is read once, each output written once.

Nothing that an implementation keeps or computes again counts, so these are the least that any could do.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from .roof import Work

FLOAT, HALF = 4, 2  # bytes of float32, of bfloat16


def newton_schulz_flops(parameter: Tensor, steps: int) -> int:
    """Operations of the products: X Xᵀ, its square, and the polynomial times X, from the smaller side."""
    small, large = sorted(parameter.shape[-2:])
    matrices = parameter.numel() // (small * large)
    return matrices * steps * (2 * small**2 * large + 2 * small**3 + 2 * small**2 * large)


def of_selection(tokens: int, experts: int) -> Work:
    """Finding the k-th largest score: every float32 score is read. Comparisons do not count."""
    return Work(0, FLOAT * tokens * experts)


def of_rule(tokens: int, experts: int) -> Work:
    """A rule's forward and backward: scores in, gates and the assignment out, the gates' gradients in, the scores'
    out.
    """
    return Work(0, (4 * FLOAT + 1) * tokens * experts)


def of_cross_entropy(tokens: int, vocabulary: int, d_model: int) -> Work:
    """The head's loss with its gradients: the products x Wᵀ, dx and dW, of 2 · tokens · words · d_model each.

    x and its gradient are bfloat16, the head and its gradient float32; logits need not leave the chip.
    """
    flops = 3 * 2 * tokens * vocabulary * d_model
    return Work(flops, 2 * HALF * tokens * d_model + 2 * FLOAT * vocabulary * d_model)


def of_attention(batch: int, heads: int, time: int, head_dim: int) -> Work:
    """Causal attention with its gradients: 2 products in forward and 4 in backward, each of 2 · head_dim for every
    query and each of the (time + 1) / 2 keys that it meets on average, as `flops_per_token` counts.

    q, k, v and the output in bfloat16, once in forward; in backward these four again, the output's gradient and three.
    """
    pairs = batch * heads * time * (time + 1) / 2
    return Work(6 * 2 * head_dim * pairs, (4 + 8) * HALF * batch * heads * time * head_dim)


def of_muon(parameters: Iterable[Tensor], steps: int) -> Work:
    """Muon's step: Newton-Schulz's products, `newton_schulz_flops`; gradient in, momentum and weight in and out."""
    every = list(parameters)
    flops = sum(newton_schulz_flops(parameter, steps) for parameter in every)
    return Work(flops, 5 * FLOAT * sum(parameter.numel() for parameter in every))


def of_adamw(parameters: Iterable[Tensor]) -> Work:
    """AdamW's step: gradient in, weight and two moments in and out."""
    return Work(0, 7 * FLOAT * sum(parameter.numel() for parameter in parameters))

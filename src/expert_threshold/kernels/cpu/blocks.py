"""Operations that `blocks.cpp` computes in place of their plain PyTorch bodies, which are defined elsewhere.

`override` chooses between the two according to the table OVERRIDES. Derivatives are defined here, too. They save the
arguments, the output of attention, one number per query and the pre-activations of experts, and recompute the rest.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import register_autograd

from .. import forbidden, operator, refuse_second_derivative
from .build import BLOCKS, BLOCKS_FLAGS, LIBRARIES, load
from .build import PARTS as SOURCES

TILE = 32  # sizes of matrices must be multiples of this, since CPUs multiply tiles
FEWEST_ROWS = 64  # with fewer rows, the call and the packing cost more than they save
MOST_WEIGHTS = 1 << 23  # in one expert's matrix; each thread has room for two
MOST_SOFTCAP = 60.0  # exponentials up to e^60 = 10^26 can be summed over any vocabulary
MOST_ELEMENTS = 1 << 20  # in a matrix for Muon, in whole tiles; a larger one does not stay in a core's cache
EXACT, NONE = -1, 0  # rows of pre-activations to allocate: as many as needed, or none; as in experts.cpp
GROUP = 256  # tokens, as in cross_entropy.cpp
NUMBERS_PER_CHUNK = 1 << 25  # bound on tokens × vocabulary of gradient factors in memory at the same time, in bfloat16
PARTS = (None, "rows", "columns", "matrix")  # numbered as in muon.cpp


# Whether the kernels can run.


@operator()
def block_products() -> bool:
    """Return True if this PyTorch can multiply blocks of bfloat16 on this processor."""
    raise NotImplementedError


@functools.cache
def library() -> ctypes.CDLL | str:
    """Return the kernels, even if they are forbidden by now, or why they cannot run, with any remedy.

    The first call builds them, which takes five seconds.
    """
    if not torch.cpu.get_capabilities().get("avx512_bf16", False):
        return "this processor cannot multiply bfloat16 (it lacks AVX-512 BF16 or AMX)"
    kernels = load(BLOCKS, SOURCES, BLOCKS_FLAGS, LIBRARIES)
    if not isinstance(kernels, str) and not block_products():
        return "this PyTorch has no bfloat16 block products on this processor; check ONEDNN_MAX_CPU_ISA, if it is set"
    return kernels


def reason() -> str | None:
    """Return why kernels are not `available`, with any remedy, or None if they are available."""
    if (why := forbidden()) is not None:
        return why
    found = library()
    return found if isinstance(found, str) else None


def available() -> bool:
    """Return True if the library can run and is not forbidden."""
    return reason() is None


# As torch.compiler.assume_constant_result does, but without importing the whole compiler.
available._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Override(NamedTuple):
    """A kernel, and the condition on tensors under which it computes its operation."""

    takes: Callable[..., bool]
    kernel: Callable[..., Any]


def override(operation: str, *given: Any) -> Callable[..., Any] | None:
    """Return the kernel for an operation on the given tensors, or None if the plain body must compute it."""
    takes, kernel = OVERRIDES[operation]
    return kernel if takes(*given) and available() else None


def _in_tiles(x: Tensor, *widths: int, fewest: int = FEWEST_ROWS) -> bool:
    """Return True if rows like x (…, width) consist of whole tiles and there are enough rows to pay off."""
    fits = x.is_cpu and x.dtype == torch.bfloat16 and all(width % TILE == 0 for width in (x.shape[-1], *widths))
    return fits and x.numel() >= fewest * max(x.shape[-1], 1)


# Attention and the norm.


def attention(
    projected: Tensor, cos: Tensor, sin: Tensor, kv_heads: int, window: int | None = None, key_offset: bool = False
) -> Tensor:
    """Return causal softmax(q kᵀ / √head_dim) v (batch, time, heads, head_dim), where q and k are rotated and normed.

    projected: (batch, time, heads + 2 · kv_heads, head_dim), queries before keys before values; cos, sin:
    (time, head_dim / 2); all in bfloat16. heads must be a multiple of kv_heads. window: the number of keys before its
    own that a query attends to, or None. key_offset: take the slow half of each key from the previous token.
    """
    assert projected.shape[2] % kv_heads == 0, f"{projected.shape[2]} rows cannot share {kv_heads} key-value heads"
    cos, sin = cos.to(projected.dtype), sin.to(projected.dtype)
    window = projected.shape[1] if window is None else window
    return attention_forward(projected, cos, sin, kv_heads, window, key_offset)[0]


@operator()
def attention_forward(
    projected: Tensor, cos: Tensor, sin: Tensor, kv_heads: int, window: int, key_offset: bool
) -> tuple[Tensor, Tensor]:
    """Return y and the logarithms of the softmax denominators, (batch, heads, time) float32."""
    batch, time, rows, head_dim = projected.shape
    heads = rows - 2 * kv_heads
    y = projected.new_empty(batch, time, heads, head_dim)
    return y, projected.new_empty(batch, heads, time, dtype=torch.float32)


@operator()
def attention_backward(
    dy: Tensor, projected: Tensor, cos: Tensor, sin: Tensor, y: Tensor, normaliser: Tensor, window: int,
    key_offset: bool,
) -> Tensor:  # fmt: skip
    """Return the gradient of the projection."""
    return projected.new_empty(projected.shape)


def _keep_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, _, ctx.window, ctx.key_offset = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)  # otherwise, backward would receive zeros for the normalisers


def _back_through_attention(ctx: Any, dy: Tensor, _: None) -> tuple[Tensor | None, ...]:
    refuse_second_derivative()
    projected, cos, sin, y, normaliser = ctx.saved_tensors
    dx = attention_backward(dy, projected, cos, sin, y, normaliser, ctx.window, ctx.key_offset)
    return dx, None, None, None, None, None


register_autograd("expert_threshold::attention_forward", _back_through_attention, setup_context=_keep_attention)


@operator()
def norm(x: Tensor) -> Tensor:
    """Return x / rms(x) over the last dimension."""
    return x.new_empty(x.shape)


@operator()
def norm_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x."""
    return x.new_empty(x.shape)


def _keep_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _back_through_norm(ctx: Any, dy: Tensor) -> Tensor:
    refuse_second_derivative()
    return norm_backward(dy, *ctx.saved_tensors)


register_autograd("expert_threshold::norm", _back_through_norm, setup_context=_keep_inputs)


# A routed sum of relu² experts; a feed-forward is one expert that processes every token. Blocks of rows are gathered,
# multiplied, squared and multiplied again while they are in a core's cache.


def _takes_experts(x: Tensor, hidden: int, activation: str) -> bool:
    return activation == "relu2" and x.shape[-1] * hidden <= MOST_WEIGHTS and _in_tiles(x, hidden)


def routed_sum(
    x: Tensor, gates: Tensor, assignment: Tensor, weights: Sequence[Tensor], rows: int | None = None
) -> Tensor:
    """Return y_t = shared(x_t) + Σ_e z[t,e] g[t,e] down_e · relu(up_e x_t)² for x (tokens, d_model) bfloat16.

    gates, assignment: (tokens, experts), float32 and bool. weights: up (experts, d_expert, d_model) and down
    (experts, d_model, d_expert), then up and down of any shared expert, with a leading size of 1. rows: an upper bound
    on the number of assigned pairs, or None if unknown.
    """
    return _sum(x, gates, assignment, weights, assignment.numel() if rows is None else rows)


def feed_forward(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return down · relu(up · x)² for x (tokens, d_model) bfloat16 and matrices (out, in)."""
    return _sum(x, None, None, (up[None], down[None]), len(x))


def _sum(x: Tensor, gates: Tensor | None, assignment: Tensor | None, weights: Sequence[Tensor], rows: int) -> Tensor:
    cast = [weight.to(x.dtype) for weight in weights]
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, gates, *cast))
    # The shapes in a compiled graph must not depend on loads. Otherwise, allocate exactly what the pairs need.
    room = (rows if torch.compiler.is_compiling() else EXACT) if wanted else NONE
    return experts_forward(x, gates, assignment, cast, room)[0]


@operator()
def experts_forward(
    x: Tensor, gates: Tensor | None, assignment: Tensor | None, weights: list[Tensor], room: int
) -> list[Tensor]:
    """Return y and, for each term, the relu of the pre-activations (rows, d_expert), filled from the first row on.

    weights: up and down of any routed experts, then up and down of any shared expert. room: the number of rows for
    routed pairs, EXACT or NONE; shared experts have one row per token.
    """
    rows = [len(x)] * (len(weights) // 2) if room != NONE else [0] * (len(weights) // 2)
    if assignment is not None:
        rows[0] = room  # while a compiler traces, never EXACT
    return [x.new_empty(x.shape), *(x.new_empty(n, up.shape[1]) for n, up in zip(rows, weights[::2], strict=True))]


@operator()
def experts_backward(
    dy: Tensor, x: Tensor, gates: Tensor | None, assignment: Tensor | None, weights: list[Tensor], kept: list[Tensor]
) -> list[Tensor]:
    """Return the gradients of x, of any gates, and of the weights."""
    return [t.new_empty(t.shape) for t in (x, gates, *weights) if t is not None]


def _keep_experts(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, gates, assignment, weights, _ = inputs
    ctx.save_for_backward(x, gates, assignment, *weights, *output[1:])
    ctx.set_materialize_grads(False)  # otherwise, backward would allocate zeros as large as all pre-activations


def _back_through_experts(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    refuse_second_derivative()
    x, gates, assignment, *rest = ctx.saved_tensors
    weights, kept = rest[: 2 * len(rest) // 3], rest[2 * len(rest) // 3 :]
    dx, *others = experts_backward(grads[0], x, gates, assignment, weights, kept)
    dgates = None if gates is None else others.pop(0)
    return dx, dgates, None, others, None


register_autograd("expert_threshold::experts_forward", _back_through_experts, setup_context=_keep_experts)


# The loss of the head.


def _takes_head(x: Tensor, weight: Tensor, softcap: float) -> bool:
    """Return True if the kernel can apply a head `weight` (vocab, d_model) to rows like x (tokens, d_model)."""
    return 0 < softcap <= MOST_SOFTCAP and all(weight.shape) and _in_tiles(x, len(weight), fewest=1)


def cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, softcap: float, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses (tokens,) float32, which are 0 where the target is -1, and the gradients of their sum in x and
    weight, up to factors of 2 softcap and 4. Unless `with_gradient`, gradients are empty.

    x: (tokens, d_model) bfloat16; weight: (vocab, d_model), of the same dtype as its gradient; targets: (tokens,).
    Raises IndexError if a target is not in the vocabulary.
    """
    chunk = max(NUMBERS_PER_CHUNK // len(weight) // GROUP, 1) * GROUP
    if int(targets.max()) >= len(weight):
        raise IndexError(f"target {int(targets.max())} must be below the vocabulary size {len(weight)}")
    scaled = (weight * (2 / softcap)).to(x.dtype)
    losses, dx, dweight = capped_cross_entropy(x, scaled, targets.long(), softcap, chunk, with_gradient)
    return losses, dx, dweight.to(weight.dtype)


@operator()
def capped_cross_entropy(
    x: Tensor, scaled: Tensor, targets: Tensor, softcap: float, chunk: int, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `cross_entropy` returns, for scaled = weight · 2 / softcap, in chunks of that many tokens."""
    raise NotImplementedError


# Muon, which orthogonalizes and updates each matrix while it is in a core's cache.


def _takes_muon(weight: Tensor, state: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Return True if the kernel can update stacks (…, rows, columns) with their state, multiplying in `dtype`."""
    rows, columns = (-(-side // TILE) * TILE for side in weight.shape[-2:])
    plain = all(t.is_cpu and t.dtype == torch.float32 and t.is_contiguous() for t in (weight, *state))
    return plain and rows * columns <= MOST_ELEMENTS and dtype == torch.bfloat16


@operator("weights", "momenta", "second_moments")
def muon_step(
    weights: list[Tensor], grads: list[Tensor], momenta: list[Tensor], second_moments: list[Tensor],
    momentum: float, equilibrate: int, polynomials: list[float], safety: float, eps: float,
    renormalize: int, normuon_beta: float, least_second_moment: float,
    weight_decay: float, cautious: bool, rate: float,
) -> None:  # fmt: skip
    """Update float32 stacks (matrices, rows, columns) of the same shape, with the functions of `optim.muon` in order.

    second_moments: empty without NorMuon. equilibrate, renormalize: indices in PARTS. polynomials: a, b and c of each
    iteration, the first of which starts from a matrix divided by safety · norm. eps: the smallest norm to divide by.
    weight_decay: the share of a weight that a step removes. rate: the learning rate times the factor for the shape.
    """


OVERRIDES: dict[str, Override] = {
    "attention": Override(_in_tiles, attention),  # on a projection (batch, time, heads, head_dim)
    "norm": Override(_in_tiles, norm),
    "feed_forward": Override(_takes_experts, feed_forward),
    "routed_sum": Override(_takes_experts, routed_sum),
    "cross_entropy": Override(_takes_head, cross_entropy),
    "muon": Override(_takes_muon, muon_step),
}

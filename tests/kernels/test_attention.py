"""The CPU kernels for attention and the norm differ from float32 only by rounding to bfloat16."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from expert_threshold.kernels.cpu import blocks as kernels
from expert_threshold.model.attention import attend, delay, halves, norm, rotary, rotary_norm
from rounding import HALF_A_UNIT, assert_rounded, with_gradients

pytestmark = pytest.mark.usefixtures("block_kernels")

SHAPES = [(2, 64, 2, 2, 64), (1, 7, 2, 1, 32), (2, 150, 4, 2, 96), (1, 1, 1, 1, 128), (3, 65, 3, 1, 32)]
LONG = (1, 300, 2, 1, 32)
Shape = tuple[int, int, int, int, int]


def inputs(shape: Shape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The projection, the rotary table, and a gradient of the output."""
    batch, time, heads, kv_heads, head_dim = shape
    torch.manual_seed(0)
    projected = 2 * torch.randn(batch, time, heads + 2 * kv_heads, head_dim)
    cos, sin = rotary(torch.arange(float(time)), head_dim)
    dy = torch.randn(batch, time, heads, head_dim)
    return projected.bfloat16(), cos.bfloat16(), sin.bfloat16(), dy.bfloat16()


def plain(
    projected: Tensor, cos: Tensor, sin: Tensor, kv_heads: int, window: int | None = None, key_offset: bool = False
) -> Tensor:
    heads = projected.transpose(1, 2)
    turned = rotary_norm(heads[:, :-kv_heads], cos, sin)
    q, k, v = turned[:, :-kv_heads], turned[:, -kv_heads:], heads[:, -kv_heads:]
    return attend(q, delay(k) if key_offset else k, v, window=window).transpose(1, 2)


def parts(y: Tensor, dx: Tensor, kv_heads: int) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values."""
    return [t.float() for t in (y, *dx.split([dx.shape[2] - 2 * kv_heads, kv_heads, kv_heads], 2))]


def rounding(
    projected: Tensor, cos: Tensor, sin: Tensor, dy: Tensor, kv_heads: int, window: int | None, key_offset: bool
) -> list[Tensor]:
    """Return bounds on the norms of the errors in `parts`: every term is off by half a unit in its last place.

    Terms are rounded before they are summed, and squares of their errors add up. So where a sum cancels its error does
    not: with one token the gradient of a query, p (dy v − dy y) k, is zero.
    """
    heads = projected.float().transpose(1, 2)  # (batch, heads, time, width)
    queries, width = heads.shape[1] - 2 * kv_heads, heads.shape[3]
    turned = rotary_norm(heads[:, :-kv_heads], cos.float(), sin.float())
    k, v = (t.repeat_interleave(queries // kv_heads, 1) for t in (turned[:, queries:], heads[:, -kv_heads:]))
    k = delay(k) if key_offset else k
    q, dy = turned[:, :queries], dy.float().transpose(1, 2)
    ago = torch.arange(len(cos))[:, None] - torch.arange(len(cos))
    hidden = (ago < 0) | (ago > (len(cos) if window is None else window))
    p = (q @ k.mT / width**0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    y, dv = p @ v, p.mT @ dy
    ds = p * (dy @ v.mT - (dy * y).sum(-1, keepdim=True)) / width**0.5
    # The terms' squares: of y rounded, and of ds rounded beside it.
    of_y = p.square() @ v.square() + y.square()
    of_ds = ds.square() + p.square() * (dy.square() * y.square()).sum(-1, keepdim=True) / width
    of_q = of_ds @ k.square() + (ds @ k).square()
    of_k = of_ds.mT @ q.square() + (ds.mT @ q).square()
    of_v = p.square().mT @ dy.square() + dv.square()
    of_k, of_v = (t.unflatten(1, (kv_heads, -1)).sum(2) for t in (of_k, of_v))
    if key_offset:  # back to the tokens that the channels are of; the last token's slow ones are in no key
        fast, slow = halves(of_k)
        of_k = torch.cat((fast, F.pad(slow[:, :, 1:], (0, 0, 0, 0, 0, 1))), -1).flatten(-2)
    of_q, of_k = (  # the norm divides by a row's root mean square, and so its gradient
        t / x.square().mean(-1, keepdim=True)
        for t, x in ((of_q, heads[:, :queries]), (of_k, heads[:, queries:-kv_heads]))
    )
    return [HALF_A_UNIT * t.sum().sqrt() for t in (of_y, of_q, of_k, of_v)]


WINDOWS = [(SHAPES[2], 40), (SHAPES[4], 1), (SHAPES[4], 64), (LONG, 100), (LONG, 128)]


@pytest.mark.parametrize(
    ("shape", "window", "key_offset"),
    [
        *((shape, None, key_offset) for shape in SHAPES for key_offset in (False, True)),
        *((shape, window, i % 2 == 0) for i, (shape, window) in enumerate(WINDOWS)),
    ],
)
def test_outputs_and_gradients_equal_float32_up_to_rounding(shape: Shape, window: int | None, key_offset: bool) -> None:
    kv_heads = shape[3]
    x, cos, sin, dy = inputs(shape)
    wide, others = (cos.float(), sin.float()), (kv_heads, window, key_offset)
    exact = with_gradients(lambda x: plain(x, *wide, *others), x.float(), upstream=dy)
    found = with_gradients(lambda x: kernels.attention(x, cos, sin, *others), x, upstream=dy)
    bounds = rounding(x, cos, sin, dy, kv_heads, window, key_offset)
    for e, f, bound in zip(parts(*exact, kv_heads), parts(*found, kv_heads), bounds, strict=True):
        assert (f - e).norm() <= bound


def test_a_window_skips_the_panels_of_keys_before_it_and_one_of_the_sequence_hides_nothing() -> None:
    x, cos, sin, dy = inputs(LONG)
    found = (
        with_gradients(lambda x, w=window: kernels.attention(x, cos, sin, 1, w), x, upstream=dy)
        for window in (None, 299)
    )
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    windowed = kernels.attention(x, cos, sin, 1, 100)
    x[:, :64, 2:] = torch.nan  # of keys and values
    broken = kernels.attention(x, cos, sin, 1, 100)
    assert torch.equal(broken[:, 192:], windowed[:, 192:])  # its first query sees tokens from 92 on
    assert broken[:, 63].isnan().all()


def test_later_tokens_and_other_sequences_change_no_bit() -> None:
    x, cos, sin, _ = inputs((2, 150, 2, 1, 32))
    whole = kernels.attention(x, cos, sin, 1)
    for end in (1, 64, 100):
        assert torch.equal(kernels.attention(x[1:, :end], cos[:end], sin[:end], 1), whole[1:, :end])


def test_large_scores_stay_finite() -> None:
    """Nothing bounds values, and normed queries and keys reach √head_dim."""
    x, cos, sin, dy = inputs((1, 70, 2, 2, 128))
    x[:, :, :4] = 100.0
    y, dx = with_gradients(lambda x: kernels.attention(x, cos, sin, 2), x, upstream=dy)
    assert y.isfinite().all()
    assert dx.isfinite().all()


def test_the_norm_and_its_gradient_are_those_of_float32_rounded() -> None:
    torch.manual_seed(0)
    x, dy = (torch.randn(5, 30, 96).bfloat16() for _ in range(2))
    exact = with_gradients(norm, x.float(), upstream=dy)
    for columns in (x, x.transpose(0, 1).contiguous().transpose(0, 1)):
        for e, f in zip(exact, with_gradients(kernels.norm, columns, upstream=dy), strict=True):
            assert_rounded(f, e, 1)
    assert torch.equal(kernels.norm(torch.zeros(2, 32).bfloat16()), torch.zeros(2, 32).bfloat16())

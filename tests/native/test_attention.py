"""The processor's own attention and norm against the same in float32, and against torch's bfloat16."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from expert_threshold.model.attention import Attention, attend, norm, rotary, rotary_norm
from expert_threshold.native import attention as kernels
from expert_threshold.native import library

pytestmark = pytest.mark.skipif(
    library() is None, reason="no C++ compiler, or a processor that does not multiply bfloat16 tiles"
)

SHAPES = [(2, 64, 2, 2, 64), (1, 7, 2, 1, 32), (2, 150, 4, 2, 96), (1, 1, 1, 1, 128), (3, 65, 3, 1, 32)]


def inputs(shape: tuple[int, int, int, int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The projection, the rotary table, and a gradient of the output."""
    batch, time, heads, kv_heads, head_dim = shape
    torch.manual_seed(0)
    projected = 2 * torch.randn(batch, time, heads + 2 * kv_heads, head_dim)
    cos, sin = rotary(torch.arange(float(time)), head_dim)
    dy = torch.randn(batch, time, heads, head_dim)
    return projected.bfloat16(), cos.bfloat16(), sin.bfloat16(), dy.bfloat16()


def plain(projected: Tensor, cos: Tensor, sin: Tensor, kv_heads: int) -> Tensor:
    heads = projected.transpose(1, 2)
    turned = rotary_norm(heads[:, :-kv_heads], cos, sin)
    return attend(turned[:, :-kv_heads], turned[:, -kv_heads:], heads[:, -kv_heads:]).transpose(1, 2)


def with_gradient(function: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    return [y.detach(), *torch.autograd.grad(y, leaf, dy.to(y.dtype))]


def parts(y: Tensor, dx: Tensor, kv_heads: int) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values."""
    return [t.float() for t in (y, *dx.split([dx.shape[2] - 2 * kv_heads, kv_heads, kv_heads], 2))]


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_nearer_to_float32_than_torchs_operations(shape: tuple[int, int, int, int, int]) -> None:
    kv_heads = shape[3]
    x, cos, sin, dy = inputs(shape)
    exact = with_gradient(lambda x: plain(x, cos.float(), sin.float(), kv_heads), x.float(), dy)
    torchs = with_gradient(lambda x: plain(x, cos, sin, kv_heads), x, dy)
    found = with_gradient(lambda x: kernels.attention(x, cos, sin, kv_heads), x, dy)
    for e, t, f in zip(*(parts(*results, kv_heads) for results in (exact, torchs, found)), strict=True):
        assert (f - e).norm() <= 1.1 * (t - e).norm() + 1e-6 * e.norm()


def test_what_comes_later_or_stands_in_other_sequences_changes_no_bit() -> None:
    x, cos, sin, _ = inputs((2, 150, 2, 1, 32))
    whole = kernels.attention(x, cos, sin, 1)
    for end in (1, 64, 100):
        assert torch.equal(kernels.attention(x[1:, :end], cos[:end], sin[:end], 1), whole[1:, :end])


def test_the_number_of_threads_changes_no_bit() -> None:
    x, cos, sin, dy = inputs((3, 100, 4, 2, 64))
    threads = torch.get_num_threads()
    try:
        found = []
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(with_gradient(lambda x: kernels.attention(x, cos, sin, 2), x, dy))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_large_scores_stay_finite() -> None:
    """Nothing bounds those of values, and normed queries and keys meet at √head_dim."""
    x, cos, sin, dy = inputs((1, 70, 2, 2, 128))
    x[:, :, :4] = 100.0
    y, dx = with_gradient(lambda x: kernels.attention(x, cos, sin, 2), x, dy)
    assert y.isfinite().all()
    assert dx.isfinite().all()


def test_the_norm_and_its_gradient_are_those_of_float32_rounded() -> None:
    torch.manual_seed(0)
    x, dy = (torch.randn(5, 30, 96).bfloat16() for _ in range(2))
    exact = with_gradient(norm, x.float(), dy)
    for columns in (x, x.transpose(0, 1).contiguous().transpose(0, 1)):
        for e, f in zip(exact, with_gradient(kernels.norm, columns, dy), strict=True):
            assert (f.float() - e).norm() < 0.003 * e.norm()
    assert torch.equal(kernels.norm(torch.zeros(2, 32).bfloat16()), torch.zeros(2, 32).bfloat16())


def test_a_layer_takes_it_in_bfloat16_and_not_in_float32_or_with_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(kernels, "attention", lambda *inputs: taken.append(1) or plain(*inputs))
    attention, table = Attention(64, 2, 1), rotary(torch.arange(64.0), 32)
    for dtype, time, expected in ((torch.bfloat16, 64, 1), (torch.float32, 64, 0), (torch.bfloat16, 4, 0)):
        taken.clear()
        cos, sin = (t[:time].to(dtype) for t in table)
        attention(torch.randn(1, time, 64).to(dtype), cos, sin, None, 0)
        assert len(taken) == expected


def test_without_kernels_torchs_operations_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    attention, x = Attention(64, 2, 1), torch.randn(2, 64, 64).bfloat16()
    cos, sin = (t.bfloat16() for t in rotary(torch.arange(64.0), 32))
    by_kernels = attention(x, cos, sin, None, 0)
    monkeypatch.setattr(kernels, "available", lambda: False)
    by_torch = attention(x, cos, sin, None, 0)
    assert not torch.equal(by_kernels, by_torch)
    assert (by_kernels - by_torch).norm() < 0.02 * by_torch.norm()


def test_no_gradient_of_a_gradient_is_given() -> None:
    x, cos, sin, _ = inputs((1, 64, 2, 1, 32))
    x.requires_grad_()
    for y in (kernels.attention(x, cos, sin, 1), kernels.norm(x)):
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's tracer
def test_compiled_a_layer_is_one_graph_with_the_same_gradients() -> None:
    torch.manual_seed(0)
    layer, x = Attention(64, 2, 1), torch.randn(2, 64, 64).bfloat16()
    cos, sin = (t.bfloat16() for t in rotary(torch.arange(64.0), 32))
    found = []
    for forward in (layer, torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager")):
        layer.zero_grad()
        found.append(with_gradient(lambda x, forward=forward: forward(x, cos, sin, None, 0), x, torch.ones_like(x)))
        found[-1] += [weight.grad for weight in layer.parameters() if weight.grad is not None]
    for eager, compiled in zip(*found, strict=True):
        assert (compiled - eager).norm() < 0.01 * eager.norm()


def test_the_tracers_idea_of_the_operators_is_what_they_do() -> None:
    x, cos, sin, dy = inputs((1, 66, 2, 1, 32))
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(kernels._forward, (x, cos, sin, 1), test_utils=tests)
    arguments = (dy, x, cos, sin, *kernels._forward(x, cos, sin, 1))
    torch.library.opcheck(kernels._backward, arguments, test_utils=tests)
    torch.library.opcheck(kernels._norm, (x,), test_utils=tests)
    torch.library.opcheck(kernels._norm_backward, (x, x), test_utils=tests)

"""The kernels' bits: they depend on the inputs alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from torch import Tensor, nn

from expert_threshold.kernels.cpu import blocks as kernels
from expert_threshold.model.attention import rotary
from expert_threshold.model.cross_entropy import linear_cross_entropy
from expert_threshold.moe import BACKENDS
from expert_threshold.optim import Muon
from rounding import with_gradients
from routed_sum import case, outputs_and_gradients

Compute = Callable[[], Iterable[Tensor]]


def attention(tokens: int, factor: float) -> Compute:
    x = (factor * torch.randn(2, tokens, 4, 32)).bfloat16()
    cos, sin = (t.bfloat16() for t in rotary(torch.arange(float(tokens)), 32))
    return lambda: with_gradients(lambda x: kernels.attention(x, cos, sin, 1), x)


def norm(tokens: int, factor: float) -> Compute:
    x = (factor * torch.randn(tokens, 96)).bfloat16()
    return lambda: with_gradients(kernels.norm, x)


def cross_entropy(tokens: int, factor: float) -> Compute:
    x, weight = (factor * torch.randn(tokens, 64)).bfloat16(), torch.randn(640, 64)
    targets = torch.randint(640, (tokens,))
    return lambda: with_gradients(lambda x, weight: linear_cross_entropy(x, weight, targets, 15.0).mean, x, weight)


def experts(tokens: int, factor: float) -> Compute:
    given = case(torch.rand(tokens, 6) < 0.3, dtype=torch.bfloat16, d_model=64, d_expert=96)
    given = given._replace(x=factor * given.x, upstream=factor * given.upstream)
    return lambda: outputs_and_gradients(BACKENDS["cpu"], given).values()


def muon(rows: int, factor: float) -> Compute:
    start, gradients = torch.randn(2, 3, rows, 65)
    options = {"equilibrate": "rows", "renormalize": "columns", "normuon": "rows"}

    def step() -> Sequence[Tensor]:
        weights = [nn.Parameter(each.clone()) for each in start]
        for weight, gradient in zip(weights, factor * gradients, strict=True):
            weight.grad = gradient
        Muon(weights, 0.1, ns_dtype=torch.bfloat16, **options).step()
        return [weight.detach() for weight in weights]

    return step


every_kernel = pytest.mark.parametrize("make", [attention, norm, cross_entropy, experts, muon])
pytestmark = [pytest.mark.usefixtures("block_kernels"), every_kernel]


def assert_same_bits(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    torch.testing.assert_close([*found], [*expected], atol=0, rtol=0)


def test_the_number_of_threads_changes_none(make: Callable[[int, float], Compute]) -> None:
    compute, threads, found = make(700, 1), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 1):
            torch.set_num_threads(count)
            found.append([*compute()])
    finally:
        torch.set_num_threads(threads)
    for again in found[1:]:
        assert_same_bits(again, found[0])


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_none(make: Callable[[int, float], Compute], default: torch.dtype) -> None:
    compute = make(100, 1)
    expected = compute()
    torch.set_default_dtype(default)
    try:
        found = compute()
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same_bits(found, expected)


def test_what_an_earlier_call_left_behind_changes_none(make: Callable[[int, float], Compute]) -> None:
    compute, poison = make(77, 1), make(512, torch.nan)
    expected = compute()
    poison()
    assert_same_bits(compute(), expected)

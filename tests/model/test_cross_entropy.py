"""The chunked, softcapped cross-entropy against torch's on whole logits."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from created import created_by
from expert_threshold.model import cross_entropy
from expert_threshold.model.cross_entropy import linear_cross_entropy, softcap_logits
from head_loss import SHIFTS, SOFTCAPS, as_computed, by_definition, require_the_definition

TINY = torch.finfo(torch.float32).tiny  # below it processors differ in what they keep

D_MODEL, SIZE = 8, st.integers(1, 64)
SOFTCAP = 15.0


def problem(tokens: int, vocab: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, a head weight that makes the softcap matter, and targets, a third of which are ignored."""
    generator = torch.Generator().manual_seed(tokens * 1000 + vocab)
    x = torch.randn(tokens, D_MODEL, generator=generator).to(dtype)
    weight = 4 * torch.randn(vocab, D_MODEL, generator=generator)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    targets[::3] = -1
    return x.requires_grad_(), weight.requires_grad_(), targets


def assert_equals_whole(case: tuple[Tensor, Tensor, Tensor], softcap: float, *, upstream: float = 1.0) -> None:
    expected, found = by_definition(*case, softcap, upstream), as_computed(*case, softcap, upstream)
    torch.testing.assert_close(found["mean"], expected["mean"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found["losses"], expected["losses"], atol=1e-4, rtol=1e-5)
    for name in ("x", "weight"):
        bound = 1e-5 * abs(upstream) + TINY
        torch.testing.assert_close(found[name], expected[name], atol=bound, rtol=1e-4)


@settings(max_examples=40)
@given(SIZE, SIZE, st.integers(0, 70), st.integers(-1, 1), st.floats(0.5, 60), st.floats(-3, 3))
def test_value_and_gradients_equal_those_of_whole_logits_for_any_size_and_softcap(
    tokens: int, vocab: int, tokens_per_chunk: int, more: int, softcap: float, upstream: float
) -> None:
    """Chunks contain less than one token, a multiple of one token, or one logit more or less."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "LOGITS_PER_CHUNK", {"cpu": tokens_per_chunk * vocab + more})
        assert_equals_whole(problem(tokens, vocab), softcap, upstream=upstream)


@pytest.mark.parametrize("tokens", [0, 6])
def test_without_any_wanted_token_loss_and_gradients_are_zero(tokens: int) -> None:
    x, weight, targets = problem(tokens, 7)
    found = linear_cross_entropy(x, weight, torch.full_like(targets, -1), SOFTCAP)
    assert found.mean == 0
    assert found.token_losses.shape == (tokens,)
    assert (found.token_losses == 0).all()
    for gradient in torch.autograd.grad(found.mean, (x, weight)):
        assert (gradient == 0).all()


@pytest.mark.parametrize("softcap", [15.0, 60.0])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
def test_extreme_logits_stay_finite(scale: float, softcap: float) -> None:
    """All logits are at the cap, where the sum of exponentials is largest, over a very large vocabulary."""
    x = torch.full((2, 4), scale).requires_grad_()
    for sign in (1, -1):
        weight = torch.full((200_000, 4), sign * scale, requires_grad=True)
        found = linear_cross_entropy(x, weight, torch.tensor([0, 199_999]), softcap)
        torch.testing.assert_close(found.mean, torch.tensor(200_000.0).log(), rtol=1e-4, atol=0)
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(found.mean, (x, weight)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("shift", SHIFTS)
def test_logits_at_one_end_of_the_cap_keep_their_losses(shift: float, softcap: float, dtype: torch.dtype) -> None:
    """PyTorch's operations compute this, since kernels do not support a vocabulary of 300."""
    require_the_definition(softcap, shift, dtype, 300, rounded_logits=True)


def test_bfloat16_products_are_within_their_rounding_and_losses_stay_float32() -> None:
    x, weight, targets = problem(9, 11, torch.bfloat16)
    expected, found = by_definition(x, weight, targets, SOFTCAP), as_computed(x, weight, targets, SOFTCAP)
    assert found["mean"].dtype == found["losses"].dtype == torch.float32
    torch.testing.assert_close(found["mean"], expected["mean"], rtol=0.02, atol=0)
    for name, like in (("x", x), ("weight", weight)):
        assert found[name].dtype == like.dtype
        assert (found[name] - expected[name]).norm() <= 0.05 * expected[name].norm()


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_what_is_frozen_gets_no_gradient_and_the_other_its_usual_one(frozen: str) -> None:
    x, weight, targets = problem(9, 11)
    expected = torch.autograd.grad(linear_cross_entropy(x, weight, targets, SOFTCAP).mean, (x, weight))
    (x if frozen == "x" else weight).requires_grad_(False)
    linear_cross_entropy(x, weight, targets, SOFTCAP).mean.backward()
    for tensor, wanted in ((x, expected[0]), (weight, expected[1])):
        assert (tensor.grad is not None) == tensor.requires_grad
        if tensor.grad is not None:
            torch.testing.assert_close(tensor.grad, wanted)


def made_by(work: Callable[[], object]) -> list[tuple[torch.dtype, int]]:
    """Return what was made inside the custom operator, too."""
    with mock.patch.object(cross_entropy, "_cross_entropy", cross_entropy._cross_entropy._init_fn):
        return created_by(work)


def sizes_of(work: Callable[[], object]) -> list[int]:
    return [size for _, size in made_by(work)]


def test_no_tensor_as_large_as_all_logits_ever_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "LOGITS_PER_CHUNK", {"cpu": 1 << 10})
    tokens, vocab = 128, 64
    x, weight, targets = problem(tokens, vocab)
    assert max(sizes_of(lambda: by_definition(x, weight, targets, SOFTCAP))) == tokens * vocab
    sizes = sizes_of(lambda: linear_cross_entropy(x, weight, targets, SOFTCAP).mean.backward())
    assert max(sizes) == max(1 << 10, tokens * D_MODEL, vocab * D_MODEL)


def test_without_gradients_none_is_made_and_the_value_is_the_same() -> None:
    x, weight, targets = problem(10, 100)
    expected = linear_cross_entropy(x, weight, targets, SOFTCAP)
    with torch.no_grad():
        sizes = sizes_of(lambda: linear_cross_entropy(x, weight, targets, SOFTCAP))
        found = linear_cross_entropy(x, weight, targets, SOFTCAP)
    torch.testing.assert_close(found, expected)
    assert not found.mean.requires_grad
    with_gradient = sizes_of(lambda: linear_cross_entropy(x, weight, targets, SOFTCAP))
    # Of the head's size there is only the weight itself, cast or transposed.
    assert sizes.count(weight.numel()) < with_gradient.count(weight.numel())


def test_without_gradients_a_token_without_a_target_costs_no_logits() -> None:
    x, weight, targets = problem(100, 50)
    targets[4:] = -1
    with torch.no_grad():
        sizes = sizes_of(lambda: linear_cross_entropy(x, weight, targets, SOFTCAP))
    wanted = int((targets >= 0).sum())
    assert wanted * 50 in sizes
    assert max(sizes) <= max(wanted * 50, weight.numel())


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    x, weight, targets = problem(4, 5)
    mean = linear_cross_entropy(x, weight, targets, SOFTCAP).mean
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(mean, x, create_graph=True)


def test_the_softcap_is_odd_bounded_and_the_identity_near_zero() -> None:
    logits = torch.linspace(-100, 100, 201)
    capped = softcap_logits(logits, SOFTCAP)
    torch.testing.assert_close(capped, -softcap_logits(-logits, SOFTCAP))
    assert capped.abs().max() <= 15
    torch.testing.assert_close(softcap_logits(logits / 1e4, SOFTCAP), logits / 1e4, rtol=1e-4, atol=1e-7)
    assert softcap_logits(logits.bfloat16(), SOFTCAP).dtype == torch.float32


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gpus_kernel_writes_what_the_plain_operations_write(dtype: torch.dtype) -> None:
    """Without a GPU, Triton's interpreter runs it. Rows fill one tile, several tiles or part of a tile."""
    pytest.importorskip("triton", reason="triton is not installed")
    from expert_threshold.kernels.gpu.cross_entropy import softmax_slopes

    for vocab in (16, 48, 7, 50):
        given_logits = (8 * torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab))).to(DEVICE, dtype)
        given_logits[0] += 60.0  # all at one end of the cap
        wanted = (torch.arange(5) % vocab).to(DEVICE)
        slopes, expected, losses, their = given_logits.clone(), given_logits.clone(), *torch.empty(2, 5, device=DEVICE)
        softmax_slopes(slopes, wanted, losses, SOFTCAP, True, tile=16)
        buffers = [torch.empty(5, vocab, device=DEVICE) for _ in range(3)]
        cross_entropy._softmax_slopes(expected, wanted, their, SOFTCAP, True, buffers)
        torch.testing.assert_close(losses, their, atol=1e-5, rtol=1e-5)
        bound = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]  # an ulp
        torch.testing.assert_close(slopes, expected, atol=1e-6, rtol=bound)
        softmax_slopes(given_logits, wanted, losses, SOFTCAP, False, tile=16)
        torch.testing.assert_close(losses, their, atol=1e-5, rtol=1e-5)


def test_with_the_gpus_kernel_logits_stay_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: logits were copied to float32, and the copies were read and written a dozen times."""
    pytest.importorskip("triton", reason="triton is not installed")
    vocab = 200
    x, weight, targets = (tensor.detach().to(DEVICE) for tensor in problem(12, vocab, torch.bfloat16))
    x, weight = x.requires_grad_(), weight.requires_grad_()
    monkeypatch.setattr(cross_entropy.gpu, "applies", lambda _: False)
    plain = linear_cross_entropy(x, weight, targets, SOFTCAP)
    expected = torch.autograd.grad(plain.mean, (x, weight))
    monkeypatch.setattr(cross_entropy, "LOGITS_PER_CHUNK", {"kernel": 5 * vocab})
    monkeypatch.setattr(cross_entropy.gpu, "applies", lambda _: True)
    made = made_by(lambda: linear_cross_entropy(x, weight, targets, SOFTCAP))
    assert (torch.bfloat16, 5 * vocab) in made
    assert (torch.float32, 5 * vocab) not in made
    found = linear_cross_entropy(x, weight, targets, SOFTCAP)
    torch.testing.assert_close(found.token_losses, plain.token_losses, atol=1e-5, rtol=1e-5)
    for gradient, wanted in zip(torch.autograd.grad(found.mean, (x, weight)), expected, strict=True):
        assert (gradient - wanted).norm() <= 0.02 * wanted.norm()

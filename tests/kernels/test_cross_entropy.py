"""The CPU kernel for the cross-entropy of the head against its definition in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from expert_threshold.kernels.cpu import blocks as kernel
from expert_threshold.model.cross_entropy import linear_cross_entropy
from head_loss import SHIFTS, SOFTCAPS, as_computed, by_definition, require_the_definition

pytestmark = pytest.mark.usefixtures("block_kernels")
SOFTCAP = 15.0


def given(tokens: int, width: int, vocab: int, scale: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    targets = torch.randint(vocab, (tokens,))
    targets[::7] = -1
    return torch.randn(tokens, width).bfloat16(), scale * torch.randn(vocab, width), targets


CASES = {
    "whole groups": (512, 64, 128),
    "a rest of a block, group and part": (333, 32, 1120),
    "one token": (1, 32, 64),
    "panels of 32": (100, 96, 96),
    "more columns than a tile's": (70, 832, 64),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("scale", [0.05, 2.0], ids=["small logits", "logits at the cap"])
def test_losses_and_gradients_equal_the_definition_up_to_rounding(case: tuple[int, int, int], scale: float) -> None:
    x, weight, targets = given(*case, scale)
    if case[0] == 1:
        targets[:] = 5
    assert kernel.override("cross_entropy", x, weight, SOFTCAP) is not None
    found, expected = as_computed(x, weight, targets, SOFTCAP), by_definition(x, weight, targets, SOFTCAP)
    for name, value in expected.items():
        assert (found[name].float() - value).norm() <= 0.015 * value.norm() + 1e-6, name
    assert (found["losses"][targets < 0] == 0).all()
    assert (found["x"][targets < 0] == 0).all()


@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("shift", SHIFTS)
def test_logits_at_one_end_of_the_cap_have_their_losses_and_gradients(shift: float, softcap: float) -> None:
    """Regression: with caps above 44, exponentials relative to the top of the cap underflowed at its other end."""
    require_the_definition(softcap, shift, torch.bfloat16, 320, rounded_logits=False)


def test_tokens_in_many_chunks_have_the_same_losses_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, targets = given(1000, 64, 256)
    whole = as_computed(x, weight, targets, SOFTCAP)
    monkeypatch.setattr(kernel, "NUMBERS_PER_CHUNK", 1)
    torch.testing.assert_close(as_computed(x, weight, targets, SOFTCAP), whole, atol=1e-6, rtol=1e-5)


def test_without_gradients_losses_have_the_same_bits() -> None:
    x, weight, targets = given(300, 64, 256)
    expected = as_computed(x, weight, targets, SOFTCAP)["losses"]
    with torch.no_grad():
        losses = linear_cross_entropy(x, weight, targets, SOFTCAP).token_losses
    torch.testing.assert_close(losses, expected, atol=0, rtol=0)


def test_nan_in_a_token_is_its_own_loss_and_no_others() -> None:
    x, weight, targets = given(100, 64, 128)
    expected = as_computed(x, weight, targets, SOFTCAP)
    x[17] = torch.nan
    found = as_computed(x, weight, targets, SOFTCAP)
    assert found["losses"][17].isnan()
    others = torch.arange(100) != 17
    torch.testing.assert_close(found["losses"][others], expected["losses"][others], atol=0, rtol=0)


@pytest.mark.parametrize("size", [1e2, 1e30])
def test_a_token_that_is_sure_has_a_finite_loss_of_at_least_zero(size: float) -> None:
    """Logits at the cap on both sides, and so far beyond that a sigmoid's exponential would overflow."""
    weight = torch.full((64, 32), -size)
    weight[3] = size
    found = as_computed(torch.ones(4, 32).bfloat16(), weight, torch.tensor([3, 3, 5, 5]), SOFTCAP)
    assert (found["losses"][:2] >= 0).all()
    assert (found["losses"] < 31).all()
    torch.testing.assert_close(found["losses"][2:], found["losses"][:2] + 30, atol=1e-4, rtol=0)


@pytest.mark.parametrize("with_gradient", [True, False])
def test_a_target_beyond_the_vocabulary_is_refused(with_gradient: bool) -> None:
    x, weight, targets = given(100, 64, 128)
    targets[3] = 10**9
    with torch.set_grad_enabled(with_gradient), pytest.raises(IndexError, match="target 1000000000 must be below"):
        linear_cross_entropy(x.requires_grad_(), weight, targets, SOFTCAP)

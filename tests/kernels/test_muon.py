"""The CPU kernel for Muon against PyTorch's operations in float32."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from additions import ADDITIONS
from expert_threshold.optim import Muon
from expert_threshold.optim import muon as module
from rounding import assert_rounded

pytestmark = pytest.mark.usefixtures("block_kernels")

SHAPES = [
    *((64, 32), (32, 64), (64, 32), (3, 96, 32), (4, 160, 192), (128, 544)),
    *((3, 16, 128), (90, 17), (33, 65)),  # not whole tiles
    (0, 64, 32),
]


def moved(
    dtype: torch.dtype, shapes: list[tuple[int, ...]] = SHAPES, start: float = 0.0, lr: float = 0.02, **options: Any
) -> list[Tensor]:
    """Return the parameters after three steps, and their state. start: the parameters' standard deviation before."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(start * torch.randn(shape)) for shape in shapes]
    muon = Muon(parameters, lr, 0.9, ns_dtype=dtype, **options)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn(*parameter.shape[:-2], *parameter.shape[:-3:-1]).mT  # not contiguous
        muon.step()
    state = [each for of_one in muon.state.values() for each in of_one.values()]
    return [*(parameter.detach() for parameter in parameters), *state]


ROUNDINGS = 5  # one for each iteration


def test_matrices_of_all_shapes_move_as_in_float32_but_for_rounding() -> None:
    found, exact = moved(torch.bfloat16), moved(torch.float32)
    for f, e in zip(found[: len(SHAPES)], exact, strict=False):
        assert_rounded(f, e, ROUNDINGS)
    torch.testing.assert_close(found[len(SHAPES) :], exact[len(SHAPES) :])


@pytest.mark.parametrize("options", ADDITIONS.values(), ids=ADDITIONS)
def test_every_option_moves_matrices_of_all_shapes_as_in_float32_but_for_rounding(options: dict[str, Any]) -> None:
    """The options must have an effect: the paper's update is further away."""
    found, exact, plain = (
        moved(dtype, start=0.05, **more)
        for dtype, more in ((torch.bfloat16, options), (torch.float32, options), (torch.float32, {}))
    )
    start = moved(torch.float32, start=0.05, lr=0.0)
    for f, e, p, s in zip(found[: len(SHAPES)], exact, plain, start, strict=False):
        assert_rounded(f - s, e - s, 2 * ROUNDINGS)
        assert not f.numel() or (f - p).norm() > 2 * (f - e).norm()
    assert len(found) == len(exact)
    for f, e in zip(found[len(SHAPES) :], exact[len(SHAPES) :], strict=True):
        if 1 in f.shape[-2:]:  # second moments
            assert_rounded(f, e, 2 * ROUNDINGS)
        else:
            torch.testing.assert_close(f, e)


@pytest.mark.parametrize("orthogonalizer", ["newton_schulz", "polar_express"])
@pytest.mark.parametrize("shape", [(2, 12), (12, 2), (5, 3), (1, 1), (17, 40)])
def test_a_matrix_moves_by_the_bits_of_one_that_zeros_fill_up_to_whole_tiles(
    shape: tuple[int, int], orthogonalizer: Literal["newton_schulz", "polar_express"]
) -> None:
    rows, columns = shape
    small, whole = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.zeros(32, 64))
    whole.data[:rows, :columns] = 1
    # Muon's rate grows with the number of rows over that of columns.
    for weight, lr in ((small, 0.02), (whole, 0.02 * max(1.0, rows / columns) ** 0.5)):
        generator = torch.Generator().manual_seed(0)
        muon = Muon([weight], lr, 0.9, ns_dtype=torch.bfloat16, orthogonalizer=orthogonalizer)
        for _ in range(3):
            weight.grad = torch.zeros_like(weight)
            weight.grad[:rows, :columns] = torch.randn(shape, generator=generator)
            muon.step()
    assert torch.equal(small, whole[:rows, :columns])
    assert (small - 1).norm() > 0.01
    whole.data[:rows, :columns] = 0
    assert (whole == 0).all()


@pytest.mark.parametrize("side", ["rows", "columns", "longer"])
@pytest.mark.parametrize("shape", [(1, 40), (40, 1)])
def test_second_moments_of_a_single_row_or_column_are_those_of_its_side(shape: tuple[int, int], side: str) -> None:
    found, exact = (moved(dtype, shapes=[shape], normuon=side) for dtype in (torch.bfloat16, torch.float32))
    for f, e in zip(found, exact, strict=True):
        assert (f - e).norm() <= 0.1 * e.norm()


def test_the_company_changes_no_bit() -> None:
    alone = moved(torch.bfloat16, shapes=SHAPES[:1])
    first = moved(torch.bfloat16, shapes=[SHAPES[0], SHAPES[-1]])
    assert all(torch.equal(a, b) for a, b in zip(alone, (first[0], first[2]), strict=True))


def test_matrices_of_any_size_move_and_zeros_stay() -> None:
    for factor in (1e-38, 1e-12, 1.0, 1e15):
        weight = nn.Parameter(torch.zeros(2, 32, 64))
        weight.grad = torch.randn(2, 32, 64) * factor
        weight.grad[1] = 0
        Muon([weight], 0.1, 0.9, ns_dtype=torch.bfloat16).step()
        assert weight.isfinite().all()
        assert (weight[0] != 0).any()
        assert (weight[1] == 0).all()


@pytest.mark.parametrize("first", [0, 1])
def test_one_that_the_kernel_cannot_take_moves_beside_those_it_does(first: int) -> None:
    """It may come first or last among matrices of its shape, and the others are updated as they are alone."""
    gradient = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    strided, plain = nn.Parameter(torch.zeros(64, 32).T), nn.Parameter(torch.zeros(32, 64))
    alone = nn.Parameter(torch.zeros(32, 64))
    strided.grad, plain.grad, alone.grad = (gradient.clone() for _ in range(3))
    both = [strided, plain] if first == 0 else [plain, strided]
    Muon(both, 0.02, 0.9, ns_dtype=torch.bfloat16).step()
    Muon([alone], 0.02, 0.9, ns_dtype=torch.bfloat16).step()
    assert torch.equal(plain, alone)
    assert alone.abs().max() > 1e-3
    assert_rounded(strided, plain, 2 * ROUNDINGS)  # each is so far from float32


def test_what_autograd_saved_before_a_step_is_stale_behind_it() -> None:
    weight = nn.Parameter(torch.randn(64, 32))
    muon = Muon([weight], 0.1, 0.9, ns_dtype=torch.bfloat16)
    weight.grad = torch.randn(64, 32)
    muon.step()
    loss, momentum = weight.square().sum(), muon.state[weight]["momentum"]._version
    muon.step()
    assert muon.state[weight]["momentum"]._version > momentum
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(("name", "value"), [("COEFFICIENTS", (0.5, -0.25, 0.125)), ("EPS", 1e3)])
def test_the_kernel_uses_the_optimizers_constants(name: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = moved(torch.bfloat16)
    monkeypatch.setattr(module, name, value)
    found, exact = moved(torch.bfloat16), moved(torch.float32)
    for f, e, u in zip(found[: len(SHAPES) - 1], exact, usual, strict=False):
        assert_rounded(f, e, ROUNDINGS)
        assert (f - u).norm() > 0.1 * u.norm()

"""Each addition to Muon against its equation, written out in float64 for one matrix at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from additions import ADDITIONS
from expert_threshold.optim import Muon
from expert_threshold.optim import muon as muon_module
from expert_threshold.optim.muon import POLAR_EXPRESS

SHAPES = {"tall": (16, 6), "wide": (6, 16), "square": (8, 8), "experts": (3, 12, 5), "column": (7, 1), "row": (1, 7)}
SLOPES = (8.1566, 4.0429, 3.8917, 3.2858, 2.3465)
RATE, MOMENTUM, STEPS = 0.05, 0.9, 4

OPTIONS: dict[str, dict[str, Any]] = {"none": {}, **ADDITIONS}


def orthogonalized(matrix: Tensor, kind: str, steps: int) -> Tensor:
    """Singular values go through polynomials, singular vectors stay."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.norm()
    polynomials = [(3.4445, -4.7750, 2.0315)] * steps
    if kind == "polar_express":
        s = s / 1.01
        polynomials = [POLAR_EXPRESS[min(i, 4)] for i in range(steps)]
    for a, b, c in polynomials:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ vh


def with_equal_norms(matrix: Tensor, parts: str) -> Tensor:
    """Give rows or columns equal norms, and the whole the norm of an orthogonal matrix."""
    if parts == "rows":
        matrix = torch.stack([row / row.norm() for row in matrix])
    elif parts == "columns":
        matrix = torch.stack([column / column.norm() for column in matrix.T]).T
    return matrix * min(matrix.shape) ** 0.5 / matrix.norm()


def defined(weight: Tensor, gradients: Tensor, options: dict[str, Any]) -> Tensor:
    """Step one matrix by the equations of the documentation."""
    rows, columns = weight.shape
    momentum: Tensor = torch.zeros_like(weight)
    side = options.get("normuon")
    if side == "longer":
        side = "rows" if rows >= columns else "columns"
    moments = torch.zeros(rows if side == "rows" else columns, dtype=weight.dtype)
    beta = options.get("normuon_beta", 0.95)
    for gradient in gradients:
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
        u = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
        if "equilibrate" in options:
            u = with_equal_norms(u, options["equilibrate"])
        u = orthogonalized(u, options.get("orthogonalizer", "newton_schulz"), options.get("ns_steps", 5))
        if "renormalize" in options:
            u = with_equal_norms(u, options["renormalize"])
        if side is not None:
            moments = beta * moments + (1 - beta) * (u**2).mean(1 if side == "rows" else 0)
            scaled = u / (moments[:, None] if side == "rows" else moments) ** 0.5
            u = scaled * u.norm() / scaled.norm()
        decayed = weight * (u * weight >= 0) if options.get("cautious") else weight
        weight = weight - RATE * options.get("weight_decay", 0.0) * decayed - RATE * max(1, rows / columns) ** 0.5 * u
    return weight


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_matrix_moves_by_its_equation(options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    parameters, gradients = (
        {name: torch.randn(*more, *shape, generator=generator).double() for name, shape in SHAPES.items()}
        for more in ((), (STEPS,))
    )
    moved = {name: nn.Parameter(start.clone()) for name, start in parameters.items()}
    muon = Muon(moved.values(), RATE, MOMENTUM, ns_dtype=torch.float64, **options)
    for step in range(STEPS):
        for name, parameter in moved.items():
            parameter.grad = gradients[name][step].clone()
        muon.step()
    for name, start in parameters.items():
        matrices = start.view(-1, *start.shape[-2:])
        of_each = gradients[name].view(STEPS, *matrices.shape).unbind(1)
        expected = torch.stack([defined(*each, options) for each in zip(matrices, of_each, strict=True)])
        found = moved[name].detach().view_as(expected)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}")


def test_the_polynomials_end_within_0_1412_of_one_from_a_thousandth_on() -> None:
    values = torch.logspace(-3, 0, 10_001, dtype=torch.float64)
    for a, b, c in POLAR_EXPRESS:
        values = a * values + b * values**3 + c * values**5
    assert (values - 1).abs().max().item() == pytest.approx(0.14113, abs=1e-5)
    assert values.max() - 1 == pytest.approx(1 - values.min().item(), abs=1e-5)  # so that no error could be smaller
    assert [a for a, _, _ in POLAR_EXPRESS] == pytest.approx(SLOPES, abs=1e-4)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_zero_gradients_leave_no_nan_and_move_nothing_that_does_not_decay(options: dict[str, Any]) -> None:
    weight = nn.Parameter(torch.ones(3, 8, 4))
    muon = Muon([weight], RATE, MOMENTUM, ns_dtype=torch.float32, **options)
    for step in range(3):
        weight.grad = torch.zeros(3, 8, 4)
        weight.grad[2] = 1 + step
        muon.step()
    still = (1 - RATE * options.get("weight_decay", 0.0)) ** 3
    torch.testing.assert_close(weight[:2].detach(), torch.full((2, 8, 4), still))
    assert weight.isfinite().all()
    assert (weight[2] != still).any()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_parameter_restored_from_torchs_state_dict_continues_bit_for_bit(options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(4)
    gradients = torch.randn(6, 3, 8, 4, generator=generator)
    whole, half = (nn.Parameter(torch.ones(3, 8, 4)) for _ in range(2))
    through, first = (Muon([weight], RATE, MOMENTUM, ns_dtype=torch.float32, **options) for weight in (whole, half))
    for step in range(6):
        if step == 3:
            state = first.state_dict()
            first = Muon([half], ns_dtype=torch.float32)
            first.load_state_dict(state)
        for weight, by in ((whole, through), (half, first)):
            weight.grad = gradients[step].clone()
            by.step()
    assert torch.equal(whole, half)


def test_second_moments_have_one_number_for_each_row_or_column() -> None:
    tall, wide = nn.Parameter(torch.ones(3, 8, 4)), nn.Parameter(torch.ones(4, 8))
    groups = [{"params": [tall], "normuon": "columns"}, {"params": [wide], "normuon": "longer"}]
    muon = Muon(groups, normuon="rows")
    assert muon.initial_state(tall)["second_moment"].shape == (3, 1, 4)
    assert muon.initial_state(wide)["second_moment"].shape == (1, 8)
    assert Muon([tall], normuon="longer").initial_state(tall)["second_moment"].shape == (3, 8, 1)
    assert "second_moment" not in Muon([tall]).initial_state(tall)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_batches_of_any_size_move_alike(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    gradient = torch.randn(2, 5, 8, 4, generator=generator)
    moved = []
    for limit in (1, 70, 2**24):
        monkeypatch.setitem(muon_module.BATCH_ELEMENTS, "cpu", limit)
        stack, single = nn.Parameter(torch.ones(5, 8, 4)), nn.Parameter(torch.ones(8, 4))
        muon = Muon([stack, single], RATE, MOMENTUM, ns_dtype=torch.float32, **options)
        for each in gradient:
            stack.grad, single.grad = each.clone(), each[0].clone()
            muon.step()
        moved.append(torch.cat([stack.detach(), single.detach()[None]]))
    torch.testing.assert_close(moved[0], moved[2])
    torch.testing.assert_close(moved[1], moved[2])

"""Muon against torch.optim.Muon, slice by slice, and the Newton-Schulz iteration against its polynomial."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import _muon as torch_muon

from expert_threshold.optim import Muon, fast_dtype, newton_schulz
from expert_threshold.optim import muon as muon_module

SHAPES = [(8, 8), (6, 16), (16, 6), (1, 5), (5, 1), (3, 8, 4), (2, 4, 8), (2, 3, 4, 8)]


def by_singular_values(matrix: Tensor, steps: int) -> Tensor:
    """The definition: each singular value s of M / ‖M‖ becomes p(p(…p(s))), p(s) = a s + b s³ + c s⁵."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag_embed(s) @ vh


def parameters(shapes: list[tuple[int, ...]], seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {f"p{i}": nn.Parameter(torch.randn(shape, generator=generator)) for i, shape in enumerate(shapes)}


def set_gradients(named: dict[str, nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in named.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def slices(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1, *tensor.shape[-2:])


@settings(deadline=None, max_examples=50)
@given(rows=st.integers(1, 24), columns=st.integers(1, 24), steps=st.integers(1, 6), seed=st.integers(0, 2**16))
def test_singular_values_follow_the_polynomial_and_singular_vectors_stay(
    rows: int, columns: int, steps: int, seed: int
) -> None:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(
        newton_schulz(matrix, steps).double(), by_singular_values(matrix, steps), atol=1e-4, rtol=1e-4
    )


def test_float32_agrees_with_float64_even_where_singular_values_span_eight_decades() -> None:
    generator = torch.Generator().manual_seed(1)
    u, _, vh = torch.linalg.svd(torch.randn(64, 128, generator=generator, dtype=torch.float64), full_matrices=False)
    matrix = u @ torch.diag(torch.logspace(0, -8, 64, dtype=torch.float64)) @ vh
    exact = newton_schulz(matrix, dtype=torch.float64)
    torch.testing.assert_close(newton_schulz(matrix.float()).double(), exact, atol=2e-5, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_equals_its_slices_and_the_transpose_commutes(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    result = newton_schulz(matrices)
    assert result.shape == shape
    each = torch.stack([newton_schulz(matrix) for matrix in slices(matrices)]).view(shape)
    torch.testing.assert_close(result, each)
    torch.testing.assert_close(result, newton_schulz(matrices.mT).mT)


def test_bfloat16_is_within_its_rounding_of_float32() -> None:
    matrices = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(3))
    rounded = newton_schulz(matrices, dtype=torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    exact = newton_schulz(matrices)
    assert (rounded.float() - exact).norm() < 0.025 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [0.0, 1e-38, 1e-12, 1e25])
def test_matrices_of_any_size_give_finite_results_and_zeros_give_zeros(dtype: torch.dtype, factor: float) -> None:
    matrices = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(4)) * factor
    matrices[1] = 0
    result = newton_schulz(matrices, dtype=dtype)
    assert result.isfinite().all()
    assert (result[1] == 0).all()


def test_the_input_is_left_alone() -> None:
    matrices = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(5))
    before = matrices.clone()
    newton_schulz(matrices, steps=1)
    assert torch.equal(matrices, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_slice_moves_as_under_torchs_own_muon(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if dtype == torch.float32:  # torch's always runs in bfloat16, so let its cast do nothing
        monkeypatch.setattr(Tensor, "bfloat16", lambda tensor: tensor.clone())
    ours = parameters([(16, 6), (16, 6), (6, 16), (8, 8), (3, 16, 6), (2, 6, 16)])
    theirs = {name: [nn.Parameter(matrix.clone()) for matrix in slices(p)] for name, p in ours.items()}
    start = {name: parameter.detach().clone() for name, parameter in ours.items()}
    oracle = torch_muon.Muon(
        [p for matrices in theirs.values() for p in matrices],
        lr=0.02,
        momentum=0.9,
        weight_decay=0.0,
        adjust_lr_fn="original",
    )
    muon = Muon(ours, ns_steps=5, ns_dtype=dtype)
    for seed in range(4):
        set_gradients(ours, seed)
        for name, matrices in theirs.items():
            grad = ours[name].grad
            assert grad is not None
            for parameter, part in zip(matrices, slices(grad), strict=True):
                parameter.grad = part.clone()
        muon.step(0.02, 0.9)
        oracle.step()
    for name, matrices in theirs.items():
        ours_moved = slices(ours[name]) - slices(start[name])
        theirs_moved = torch.stack([p.detach() for p in matrices]) - slices(start[name])
        tolerance = 2e-6 if dtype == torch.float32 else 5e-3
        torch.testing.assert_close(ours_moved, theirs_moved, atol=tolerance, rtol=0)
        assert theirs_moved.abs().max() > 0.01, "the comparison would not notice a difference"


def test_small_batches_move_the_parameters_as_large_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = []
    for limit in (1, 200, 2**24):
        monkeypatch.setitem(muon_module.BATCH_ELEMENTS, "cpu", limit)
        named = parameters([(8, 12), (3, 8, 12), (8, 12), (12, 8)])
        set_gradients(named, 1)
        Muon(named, ns_steps=5, ns_dtype=torch.float32).step(0.1, 0.9)
        moved.append(torch.cat([p.detach().flatten() for p in named.values()]))
    torch.testing.assert_close(moved[0], moved[2])
    torch.testing.assert_close(moved[1], moved[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transposed_parameter_moves_as_a_plain_one(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    matrix, gradient = (torch.randn(32, 64, generator=generator) for _ in range(2))
    plain, strided = nn.Parameter(matrix.clone()), nn.Parameter(matrix.T.contiguous().T)
    for parameter in (plain, strided):
        parameter.grad = gradient.clone()
        Muon({"p": parameter}, ns_steps=5, ns_dtype=dtype).step(0.1, 0.9)
    torch.testing.assert_close(plain, strided, atol=1e-3, rtol=0)
    assert (strided - matrix).abs().max() > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stack_that_has_no_view_is_refused_since_its_copy_would_move(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.zeros(2, 3, 64, 32).transpose(0, 1))
    weight.grad = torch.ones(weight.shape)
    with pytest.raises(RuntimeError, match="view"):
        Muon({"p": weight}, ns_steps=5, ns_dtype=dtype).step(0.1, 0.9)


def test_a_zero_gradient_moves_nothing_and_leaves_no_nan() -> None:
    named = parameters([(4, 6), (2, 4, 6)])
    before = {name: p.detach().clone() for name, p in named.items()}
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    Muon(named, ns_steps=5, ns_dtype=torch.float32).step(0.1, 0.9)
    assert all(torch.equal(named[name], before[name]) for name in named)


def test_an_expert_without_gradient_leaves_the_others_of_its_stack_alone() -> None:
    stacked = parameters([(3, 4, 6)])
    set_gradients(stacked, 2)
    grad = stacked["p0"].grad
    assert grad is not None
    grad[1] = 0
    alone = {"p0": nn.Parameter(stacked["p0"].detach()[2].clone())}
    alone["p0"].grad = grad[2].clone()
    before = stacked["p0"].detach().clone()
    for named in (stacked, alone):
        Muon(named, ns_steps=5, ns_dtype=torch.float32).step(0.1, 0.9)
    assert torch.equal(stacked["p0"][1], before[1])
    torch.testing.assert_close(stacked["p0"][2], alone["p0"])


def test_a_parameter_without_gradient_is_skipped_and_keeps_its_momentum() -> None:
    named = parameters([(4, 6), (4, 6)])
    muon = Muon(named, ns_steps=5, ns_dtype=torch.float32)
    set_gradients(named, 3)
    muon.step(0.1, 0.9)
    set_gradients(named, 4)
    named["p1"].grad = None
    parameter, momentum = named["p1"].detach().clone(), muon.momenta["p1"].clone()
    muon.step(0.1, 0.9)
    assert torch.equal(named["p1"], parameter)
    assert torch.equal(muon.momenta["p1"], momentum)
    for p in named.values():
        p.grad = None
    muon.step(0.1, 0.9)


def test_the_fast_dtype_is_bfloat16_only_where_hardware_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for capabilities, dtype in (
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"avx512_bf16": False}, torch.float32),
        ({"neon": True}, torch.float32),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda capabilities=capabilities: capabilities)
        assert fast_dtype(torch.device("cpu")) == dtype
    for capability, dtype in (((7, 5), torch.float32), ((8, 0), torch.bfloat16), ((12, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert fast_dtype(torch.device("cuda")) == dtype
    assert fast_dtype(torch.device("mps")) == torch.float32

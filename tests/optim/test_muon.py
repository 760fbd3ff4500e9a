"""Muon against torch.optim.Muon, slice by slice, and the Newton-Schulz iteration against its polynomial."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from expert_threshold.optim import Muon, fast_dtype, orthogonalize

from .test_groups import set_gradients
from .test_options import orthogonalized


def parameters(shapes: list[tuple[int, ...]], seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {f"p{i}": nn.Parameter(torch.randn(shape, generator=generator)) for i, shape in enumerate(shapes)}


@settings(deadline=None, max_examples=50)
@given(rows=st.integers(1, 24), columns=st.integers(1, 24), steps=st.integers(1, 6), seed=st.integers(0, 2**16))
def test_singular_values_follow_the_polynomial_and_vectors_stay(rows: int, columns: int, steps: int, seed: int) -> None:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    expected = orthogonalized(matrix.double(), "newton_schulz", steps)
    torch.testing.assert_close(orthogonalize(matrix, steps=steps).double(), expected, atol=1e-4, rtol=1e-4)


def test_float32_agrees_with_float64_even_where_singular_values_span_eight_decades() -> None:
    generator = torch.Generator().manual_seed(1)
    u, _, vh = torch.linalg.svd(torch.randn(64, 128, generator=generator, dtype=torch.float64), full_matrices=False)
    matrix = u @ torch.diag(torch.logspace(0, -8, 64, dtype=torch.float64)) @ vh
    exact = orthogonalize(matrix, dtype=torch.float64)
    torch.testing.assert_close(orthogonalize(matrix.float()).double(), exact, atol=2e-5, rtol=0)


def test_bfloat16_is_within_its_rounding_of_float32() -> None:
    matrices = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(3))
    rounded = orthogonalize(matrices, dtype=torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    exact = orthogonalize(matrices)
    assert (rounded.float() - exact).norm() < 0.025 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [0.0, 1e-38, 1e-12, 1e25])
def test_matrices_of_any_size_stay_and_give_finite_results_and_zeros_zeros(dtype: torch.dtype, factor: float) -> None:
    matrices = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(4)) * factor
    matrices[1] = 0
    before = matrices.clone()
    result = orthogonalize(matrices, dtype=dtype)
    assert result.isfinite().all()
    assert (result[1] == 0).all()
    assert torch.equal(matrices, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transposed_parameter_moves_as_a_plain_one(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    matrix, gradient = (torch.randn(32, 64, generator=generator) for _ in range(2))
    plain, strided = nn.Parameter(matrix.clone()), nn.Parameter(matrix.T.contiguous().T)
    for parameter in (plain, strided):
        parameter.grad = gradient.clone()
        Muon([parameter], 0.1, 0.9, ns_dtype=dtype).step()
    torch.testing.assert_close(plain, strided, atol=1e-3, rtol=0)
    assert (strided - matrix).abs().max() > 0.01


@pytest.mark.parametrize("shape", [(3, 6, 8), (2, 64, 32)], ids=["operations", "kernel"])
def test_in_its_turn_a_group_moves_as_it_would_have_at_as_many_times_the_rate(shape: tuple[int, ...]) -> None:
    turns, every = parameters([shape, shape, shape]), parameters([shape, shape, shape])
    always, odd, even = turns.values()
    in_turn = ({"params": [p], "period": 2, "phase": i} for i, p in enumerate((even, odd)))
    muon = Muon([{"params": [always]}, *in_turn], 0.1, 0.9)
    plain = Muon([{"params": [p], "lr": 0.2 if i else 0.1} for i, p in enumerate(every.values())], momentum=0.9)
    for step in range(5):
        before = [[p.detach().clone() for p in named.values()] for named in (turns, every)]
        for named, optimizer in ((turns, muon), (every, plain)):
            set_gradients(named, step)
            optimizer.step()
        (move, move_of_odd, move_of_even), by_plain = (
            [p.detach() - b for p, b in zip(n.values(), was, strict=True)]
            for n, was in zip((turns, every), before, strict=True)
        )
        due, waiting, number = (move_of_odd, move_of_even, 1) if step % 2 else (move_of_even, move_of_odd, 2)
        for mine, its in ((move, by_plain[0]), (due, by_plain[number])):
            torch.testing.assert_close(mine, its, rtol=0, atol=2e-3)  # a move is ten times as much
        assert not waiting.any()


def test_a_parameter_without_gradient_is_skipped_and_keeps_its_momentum() -> None:
    named = parameters([(4, 6), (4, 6)])
    muon = Muon(named.values(), 0.1, 0.9, ns_dtype=torch.float32)
    set_gradients(named, 3)
    muon.step()
    set_gradients(named, 4)
    named["p1"].grad = None
    parameter, momentum = named["p1"].detach().clone(), muon.state[named["p1"]]["momentum"].clone()
    for _ in range(2):
        muon.step()
        assert torch.equal(named["p1"], parameter)
        assert torch.equal(muon.state[named["p1"]]["momentum"], momentum)
        named["p0"].grad = None  # then there is none at all


def scheduled(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], steps: int = 6) -> list[nn.Parameter]:
    """Return two matrices after steps during which a scheduler of torch changes the learning rate."""
    named = parameters([(16, 6), (6, 16)])
    optimizer = make(list(named.values()))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for seed in range(steps):
        set_gradients(named, seed)
        optimizer.step()
        scheduler.step()
    return list(named.values())


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_it_moves_as_torchs_under_its_scheduler(decay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # Torch's Muon always runs in bfloat16: let its cast do nothing, and that into a copy, by which torch 2.15 casts.
    to = Tensor.to
    monkeypatch.setattr(Tensor, "bfloat16", lambda tensor: tensor.clone())
    monkeypatch.setattr(Tensor, "to", lambda x, *a, **k: x.clone() if k.get("copy") else to(x, *a, **k))
    ours = scheduled(lambda params: Muon(params, 0.1, 0.9, ns_dtype=torch.float32, weight_decay=decay))
    theirs = scheduled(lambda params: torch.optim.Muon(params, 0.1, momentum=0.9, weight_decay=decay))
    constant = scheduled(lambda params: Muon([{"params": params, "initial_lr": 0.0, "lr": 0.0}]))
    for our, their, start in zip(ours, theirs, constant, strict=True):
        torch.testing.assert_close(our, their, atol=1e-5, rtol=0)
        assert (their - start).abs().max() > 0.05, "the comparison would not notice a difference"


def test_a_closure_computes_the_loss_and_the_gradients_of_a_step() -> None:
    weight = nn.Parameter(torch.eye(4))
    muon = Muon([weight], 0.1)

    def loss() -> Tensor:
        muon.zero_grad()
        value = weight.square().sum()
        value.backward()
        return value

    assert muon.step(loss) == 4  # type: ignore[arg-type]  # torch's closures return tensors, too
    assert weight.square().sum() < 4


@pytest.mark.parametrize("shape", [(), (8,), (8, 4, 3, 3)])
@pytest.mark.parametrize("named", [True, False])
def test_a_vector_or_a_convolution_is_refused_with_its_shape_and_a_remedy(named: bool, shape: tuple[int, ...]) -> None:
    """The convolution was updated as 32 matrices of 3 x 3."""
    matrix, vector = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(shape))
    name = "norm.weight " if named else ""
    message = re.escape(f"parameter {name}of shape {shape} is not a matrix") + ".*; use another optimizer"
    with pytest.raises(ValueError, match=message):
        Muon([("linear.weight", matrix), ("norm.weight", vector)] if named else [matrix, vector])
    muon = Muon([("linear.weight", matrix)] if named else [matrix])
    with pytest.raises(ValueError, match=message):
        muon.add_param_group({"params": [("norm.weight", vector)] if named else [vector]})
    assert [group["params"] for group in muon.param_groups] == [[matrix]]


NONSENSE: dict[str, Any] = {"lr": -1.0, "momentum": 1.0, "ns_steps": 0, "normuon_beta": 1.0, "weight_decay": -0.1}
NONSENSE |= {"orthogonalizer": "svd", "equilibrate": "matrix", "renormalize": "longer", "normuon": "matrix"}


@pytest.mark.parametrize(("name", "value"), [*NONSENSE.items(), ("lr", float("nan"))])
def test_options_that_cannot_train_are_refused_with_value_and_remedy(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} must be ")):
        Muon([nn.Parameter(torch.zeros(4, 4))], **{name: value})


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

"""Cases of the routed sum, and what every backend is required to do with them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from expert_threshold.kernels.activation import ActivationName
from expert_threshold.moe import Experts, FeedForward

D_MODEL, D_EXPERT, EXPERTS = 8, 12, 4
RoutedSum = Callable[[Tensor, Tensor, Tensor, Experts], Tensor]


class Case(NamedTuple):
    """A backend's arguments, and the upstream gradient of its output."""

    x: Tensor
    gates: Tensor
    assignment: Tensor
    experts: Experts
    upstream: Tensor


def case(
    assignment: Tensor,
    activation: ActivationName = "relu2",
    dtype: torch.dtype = torch.float32,
    *,
    d_model: int = D_MODEL,
    d_expert: int = D_EXPERT,
) -> Case:
    tokens, num_experts = assignment.shape
    torch.manual_seed(7)
    experts = Experts(num_experts, d_model, d_expert, activation)
    x, upstream = torch.randn(2, tokens, d_model).to(dtype).unbind()
    gates = torch.rand(tokens, num_experts)
    return Case(x, gates, assignment, experts, upstream)


def fanout(tokens: int, num_experts: int, per_token: int) -> Tensor:
    """Each token takes `per_token` experts, rotating."""
    place = (torch.arange(num_experts) - torch.arange(tokens)[:, None]) % num_experts
    return place < per_token


def by_loops(given: Case) -> Tensor:
    """y_t = Σ_i z[t,i] · g[t,i] · expert_i(x_t), one token and one expert at a time."""
    rows = []
    for x, gates, assignment in zip(given.x, given.gates, given.assignment, strict=True):
        y = torch.zeros_like(x)
        for i in assignment.nonzero()[:, 0].tolist():
            h = given.experts.up[i].to(x.dtype) @ x
            if given.experts.gate is None:
                a = torch.maximum(h, torch.zeros(())) ** 2
            else:
                g = given.experts.gate[i].to(x.dtype) @ x
                a = g / (1 + torch.exp(-g)) * h
            y = y + gates[i] * (given.experts.down[i].to(x.dtype) @ a)
        rows.append(y)
    return torch.stack(rows)


def feed_forward_by_hand(layer: FeedForward, x: Tensor) -> Tensor:
    h = x @ layer.up.weight.T
    a = h.relu() ** 2 if layer.gate is None else torch.nn.functional.silu(x @ layer.gate.weight.T) * h
    return a @ layer.down.weight.T


def outputs_and_gradients(backend: RoutedSum, given: Case) -> dict[str, Tensor]:
    """y and the gradients of x, the gates and every expert matrix."""
    experts = copy.deepcopy(given.experts)
    x, gates = given.x.clone().requires_grad_(), given.gates.clone().requires_grad_()
    y = backend(x, gates, given.assignment, experts)
    y.backward(given.upstream)
    found = {"y": y.detach(), "x": x.grad, "gates": gates.grad}
    found |= {name: parameter.grad for name, parameter in experts.named_parameters()}
    assert all(value is not None for value in found.values())
    return {name: value for name, value in found.items() if value is not None}


def assert_same(
    found: dict[str, Tensor], expected: dict[str, Tensor], *, atol: float = 1e-5, rtol: float = 1e-5
) -> None:
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)


ASSIGNMENTS = {
    "no token at all": torch.zeros(0, EXPERTS, dtype=torch.bool),
    "one token, no expert": torch.zeros(1, EXPERTS, dtype=torch.bool),
    "one token, every expert": torch.ones(1, EXPERTS, dtype=torch.bool),
    "all tokens to one expert": torch.arange(EXPERTS).eq(2).repeat(6, 1),
    "all tokens to the last expert": torch.arange(EXPERTS).eq(EXPERTS - 1).repeat(6, 1),
    "one empty expert": torch.arange(EXPERTS).ne(1).repeat(6, 1),
    "a single expert": torch.ones(5, 1, dtype=torch.bool),
    "a single expert, some tokens": torch.arange(5)[:, None] % 2 == 0,
    "more experts than tokens": torch.eye(3, 9, dtype=torch.bool),
    **{f"fanout {n} of {EXPERTS}": fanout(7, EXPERTS, n) for n in range(EXPERTS + 1)},
}


# What every backend is required to do. given: tokens with a fanout of 2, at least 8 of them.


def _nan_in_what_no_expert_reads_reaches_nothing(backend: RoutedSum, given: Case) -> None:
    assignment = given.assignment.clone()
    assignment[[1, 4, 7]] = False
    idle = ~assignment.any(-1, keepdim=True)
    clean = given._replace(assignment=assignment)
    poisoned = clean._replace(
        x=clean.x.masked_fill(idle, torch.nan),
        gates=clean.gates.masked_fill(~assignment, torch.nan),
        upstream=clean.upstream.masked_fill(idle, torch.nan),
    )
    found = outputs_and_gradients(backend, poisoned)
    assert_same(found, outputs_and_gradients(backend, clean), atol=0, rtol=0)
    assert (found["y"][idle[:, 0]] == 0).all()
    assert (found["x"][idle[:, 0]] == 0).all()
    assert (found["gates"][~assignment] == 0).all()


def _nan_in_a_row_stays_with_its_row_and_its_experts(backend: RoutedSum, given: Case) -> None:
    tokens, num_experts = given.assignment.shape
    assignment = fanout(tokens, num_experts, 1).to(given.x.device)
    poisoned = given._replace(x=given.x.clone(), assignment=assignment)
    poisoned.x[3] = torch.nan
    expert = int(assignment[3].nonzero())
    found = outputs_and_gradients(backend, poisoned)
    others = torch.arange(tokens) != 3
    assert found["y"][3].isnan().all()
    for key in ("y", "x", "gates"):
        assert found[key][others].isfinite().all(), key
    for key in ("up", "down"):
        assert found[key][torch.arange(num_experts) != expert].isfinite().all(), key


def _whatever_is_frozen_the_other_gradients_stay_the_same(backend: RoutedSum, given: Case) -> None:
    everything = outputs_and_gradients(backend, given)
    inputs = [key for key in everything if key != "y"]
    for trained in itertools.chain.from_iterable(itertools.combinations(inputs, n) for n in (1, 2)):
        experts = copy.deepcopy(given.experts)
        tensors = {"x": given.x.clone(), "gates": given.gates.clone(), **dict(experts.named_parameters())}
        for key, tensor in tensors.items():
            tensor.requires_grad_(key in trained)
        backend(tensors["x"], tensors["gates"], given.assignment, experts).backward(given.upstream)
        for key, tensor in tensors.items():
            assert (tensor.grad is not None) == (key in trained), (key, trained)
            if tensor.grad is not None:
                torch.testing.assert_close(tensor.grad, everything[key], atol=0, rtol=0)


def _used_twice_in_one_graph_the_gradients_add_up(backend: RoutedSum, given: Case) -> None:
    other = given._replace(gates=1 - given.gates, assignment=~given.assignment)
    parts = [outputs_and_gradients(backend, each) for each in (given, other)]
    x, experts = given.x.clone().requires_grad_(), copy.deepcopy(given.experts)
    y = backend(x, given.gates, given.assignment, experts) + backend(x, other.gates, other.assignment, experts)
    y.backward(given.upstream)
    found = {"y": y.detach(), "x": x.grad} | {key: parameter.grad for key, parameter in experts.named_parameters()}
    torch.testing.assert_close(found, {key: parts[0][key] + parts[1][key] for key in found})


def _backward_may_run_twice_and_leaves_its_inputs_alone(backend: RoutedSum, given: Case) -> None:
    once = outputs_and_gradients(backend, given)
    x, gates, experts = given.x.clone().requires_grad_(), given.gates.clone().requires_grad_(), given.experts
    upstream = given.upstream.clone()
    y = backend(x, gates, given.assignment, experts)
    for _ in range(2):
        y.backward(upstream, retain_graph=True)
    found = {"x": x.grad, "gates": gates.grad} | {key: weight.grad for key, weight in experts.named_parameters()}
    torch.testing.assert_close(found, {key: 2 * once[key] for key in found})
    for now, then in ((x, given.x), (gates, given.gates), (upstream, given.upstream)):
        assert torch.equal(now, then)


def _strides_change_nothing(backend: RoutedSum, given: Case) -> None:
    """An upstream gradient of stride 0, as a sum has, is one that bare grouped products refuse."""
    layouts: list[Callable[[Tensor], Tensor]] = [
        lambda tensor: tensor.T.contiguous().T,
        lambda tensor: torch.stack((tensor, tensor), -1).flatten(1)[:, ::2],
    ]
    expected = outputs_and_gradients(backend, given)
    for layout in layouts:
        strided = {key: layout(getattr(given, key)) for key in ("x", "gates", "assignment", "upstream")}
        assert not strided["x"].is_contiguous()
        assert_same(outputs_and_gradients(backend, given._replace(**strided)), expected)
    row, tokens = given.upstream[:1], len(given.x)
    stretched, repeated = (
        given._replace(x=rows, upstream=rows) for rows in (row.expand(tokens, -1), row.repeat(tokens, 1))
    )
    assert_same(outputs_and_gradients(backend, stretched), outputs_and_gradients(backend, repeated))


def _a_second_derivative_is_refused_rather_than_wrong(backend: RoutedSum, given: Case) -> None:
    x = given.x.clone().requires_grad_()
    y = backend(x, given.gates, given.assignment, given.experts)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(y.float().square().sum(), x, create_graph=True)


REQUIREMENTS: dict[str, Callable[[RoutedSum, Case], None]] = {
    require.__name__.strip("_"): require
    for require in (
        _nan_in_what_no_expert_reads_reaches_nothing,
        _nan_in_a_row_stays_with_its_row_and_its_experts,
        _whatever_is_frozen_the_other_gradients_stay_the_same,
        _used_twice_in_one_graph_the_gradients_add_up,
        _backward_may_run_twice_and_leaves_its_inputs_alone,
        _strides_change_nothing,
        _a_second_derivative_is_refused_rather_than_wrong,
    )
}
requirements = pytest.mark.parametrize("require", REQUIREMENTS.values(), ids=REQUIREMENTS)

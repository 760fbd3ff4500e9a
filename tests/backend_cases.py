"""Inputs for the tests of backends, and their outputs and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from expert_threshold.kernels.activation import ActivationName
from expert_threshold.moe import Experts

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
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        torch.testing.assert_close(
            found[name], value, atol=atol, rtol=rtol, msg=lambda text, name=name: f"{name}: {text}"
        )


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


def require_nan_to_stay_with_its_row_and_its_experts(backend: RoutedSum, given: Case) -> None:
    """given: each token at one expert of its own, so that most experts are another's."""
    given.x[3] = torch.nan
    expert = int(given.assignment[3].nonzero())
    found = outputs_and_gradients(backend, given)
    others = torch.arange(len(given.x)) != 3
    assert found["y"][3].isnan().all()
    for key in ("y", "x", "gates"):
        assert found[key][others].isfinite().all(), key
    for key in ("up", "down"):
        assert found[key][torch.arange(EXPERTS) != expert].isfinite().all(), key

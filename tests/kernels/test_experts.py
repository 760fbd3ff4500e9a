"""The CPU kernels for experts against the definition in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor

from expert_threshold.kernels.cpu import blocks as kernels
from expert_threshold.moe import BACKENDS, FeedForward, MoE
from expert_threshold.routing import ExpertChoice
from rounding import assert_rounded, without_kernels
from routed_sum import Case, RoutedSum, case, fanout, outputs_and_gradients, requirements

pytestmark = pytest.mark.usefixtures("block_kernels")


def skewed(tokens: int, experts: int) -> Tensor:
    """Assign every token to expert 0, and half as many tokens to each later expert."""
    return torch.arange(tokens)[:, None] % 2 ** torch.arange(experts) == 0


def some(tokens: int, experts: int) -> Tensor:
    chosen = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(3)) < 0.3
    chosen[:, -1] = False
    chosen[tokens // 2] = False
    return chosen


ASSIGNMENTS = {
    "one each": fanout(640, 4, 1),
    "three each": fanout(517, 5, 3),
    "skewed": skewed(1000, 6),
    "some, an expert and a token without": some(301, 7),
    "all to one": fanout(513, 1, 1),
    "none": torch.zeros(64, 3, dtype=torch.bool),
    "many experts": fanout(200, 65, 2),
}
SHAPES = {"panels of 64": (128, 64), "panels of 32": (32, 96), "more than a product's depth": (64, 576)}


def in_float32(given: Case) -> Case:
    experts = given.experts.bfloat16().float()
    return given._replace(x=given.x.float(), upstream=given.upstream.float(), experts=experts)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("assignment", ASSIGNMENTS.values(), ids=ASSIGNMENTS.keys())
def test_outputs_and_gradients_equal_the_definition_up_to_rounding(assignment: Tensor, shape: tuple[int, int]) -> None:
    d_model, d_expert = shape
    given = case(assignment, dtype=torch.bfloat16, d_model=d_model, d_expert=d_expert)
    assert kernels.override("routed_sum", given.x, d_expert, "relu2") is not None
    found = outputs_and_gradients(BACKENDS["cpu"], given)
    for name, value in outputs_and_gradients(BACKENDS["reference"], in_float32(given)).items():
        difference, size = (t.flatten(1).norm(dim=1) for t in (found[name].float() - value, value))
        assert (difference <= 0.02 * size + 0.02 * size.square().mean().sqrt()).all(), name  # 8 bits, a few roundings


def test_on_the_whole_their_error_is_that_of_two_roundings() -> None:
    given = case(fanout(600, 4, 2), dtype=torch.bfloat16, d_model=128, d_expert=256)
    found = outputs_and_gradients(BACKENDS["cpu"], given)
    for name, value in outputs_and_gradients(BACKENDS["reference"], in_float32(given)).items():
        assert_rounded(found[name], value, 2, name)


def test_a_row_does_not_depend_on_those_beside_it() -> None:
    given = case(fanout(512, 4, 2), dtype=torch.bfloat16, d_model=64, d_expert=128)
    other = given._replace(
        x=torch.cat((given.x[:100], 3 * given.x[100:].flip(0))),
        assignment=torch.cat((given.assignment[:100], ~given.assignment[100:])),
    )
    a, b = (outputs_and_gradients(BACKENDS["cpu"], each) for each in (given, other))
    for name in ("y", "x", "gates"):
        torch.testing.assert_close(a[name][:100], b[name][:100], atol=0, rtol=0)


@requirements
def test_the_kernels_meet_every_requirement(require: Callable[[RoutedSum, Case], None]) -> None:
    require(BACKENDS["cpu"], case(fanout(128, 4, 2), dtype=torch.bfloat16, d_model=64, d_expert=96))


@pytest.mark.parametrize("tokens", [64, 300, 512])
def test_a_feed_forward_is_that_of_float32_rounded_by_kernels_and_by_operations(tokens: int) -> None:
    torch.manual_seed(0)
    layer = FeedForward(64, 160)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(weight.bfloat16())
    x, upstream = torch.randn(2, tokens, 64).bfloat16()

    def outcome(dtype: torch.dtype) -> dict[str, Tensor]:
        rows = x.to(dtype, copy=True).requires_grad_()
        y = layer(rows)
        grads = torch.autograd.grad(y, (rows, *layer.parameters()), upstream.to(dtype))
        return {"y": y.detach(), **dict(zip(("x", "up", "down"), grads, strict=True))}

    exact, by_kernels = outcome(torch.float32), outcome(torch.bfloat16)
    with without_kernels():
        by_operations = outcome(torch.bfloat16)
    for name, value in exact.items():
        assert_rounded(by_kernels[name], value, 2, name)
        assert_rounded(by_operations[name], value, 2, name)


def test_shared_and_routed_experts_at_once_are_their_sum() -> None:
    torch.manual_seed(0)
    x, upstream = torch.randn(2, 300, 64).bfloat16()
    assignment, gates = some(300, 5), torch.rand(300, 5)
    weights = [(torch.randn(shape) / 8).bfloat16() for shape in ((5, 96, 64), (5, 64, 96), (160, 64), (64, 160))]

    def outcome(at_once: bool) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (x, gates, *weights)]
        rows, scale, *matrices = leaves
        routed, shared = matrices[:2], matrices[2:]
        if at_once:
            y = kernels.routed_sum(rows, scale, assignment, [*routed, *(weight[None] for weight in shared)])
        else:
            y = kernels.routed_sum(rows, scale, assignment, routed) + kernels.feed_forward(rows, *shared)
        return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]

    for found, expected in zip(outcome(True), outcome(False), strict=True):
        assert (found - expected).norm() <= 0.005 * expected.norm()


@pytest.mark.parametrize("shared_experts", [0, 1, 2])
@pytest.mark.parametrize("gate_norm", [None, "fanout"])
def test_a_whole_layer_is_that_of_the_reference(shared_experts: int, gate_norm: Literal["fanout"] | None) -> None:
    x = torch.randn(4, 75, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    outcomes = []
    for dispatch, dtype in (("auto", torch.bfloat16), ("reference", torch.float32)):
        torch.manual_seed(0)
        layer = MoE(64, 96, ExpertChoice(6, 2), shared_experts, dispatch, gate_norm=gate_norm)
        rows = x.to(dtype, copy=True).requires_grad_()
        y, _ = layer(rows)
        y.float().square().sum().backward()
        grads = [weight.grad for weight in (rows, *layer.parameters())]
        outcomes.append([y.detach(), *(grad for grad in grads if grad is not None)])
    for found, expected in zip(*outcomes, strict=True):
        assert (found.float() - expected).norm() <= 0.02 * expected.norm()


def test_without_gradients_the_output_is_the_same() -> None:
    given = case(fanout(300, 4, 2), dtype=torch.bfloat16, d_model=64, d_expert=96)
    expected = outputs_and_gradients(BACKENDS["cpu"], given)["y"]
    with torch.no_grad():
        torch.testing.assert_close(BACKENDS["cpu"](*given[:4]), expected, atol=0, rtol=0)


def test_what_is_kept_is_the_input_and_the_pre_activations() -> None:
    given = case(fanout(512, 4, 2), dtype=torch.bfloat16, d_model=64, d_expert=96)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        BACKENDS["cpu"](given.x.requires_grad_(), *given[1:4])
    own = {weight.data_ptr() for weight in given.experts.parameters()}
    sizes = [t.numel() * t.itemsize for t in kept if t.data_ptr() not in own]
    weights = 2 * 2 * given.experts.up.numel()  # cast to bfloat16
    assert sum(sizes) <= 512 * 64 * 2 + 1024 * 96 * 2 + 512 * 4 * (4 + 1) + weights


@pytest.mark.parametrize("part", ["shared", "shared.up", "shared.down"])
def test_shared_experts_with_a_hook_are_called(part: str) -> None:
    layer = MoE(64, 96, ExpertChoice(4, 1))
    called: list[bool] = []
    layer.get_submodule(part).register_forward_hook(lambda *_: called.append(True))
    layer(torch.randn(1, 128, 64).bfloat16())
    assert called


def test_more_pairs_than_there_is_room_for_are_refused() -> None:
    x, weights = torch.randn(64, 32).bfloat16(), torch.randn(2, 32, 32).bfloat16()
    with pytest.raises(RuntimeError, match="128 token-expert pairs do not fit into 127 rows"):
        kernels.experts_forward(x, torch.rand(64, 2), torch.ones(64, 2, dtype=torch.bool), [weights, weights], 127)


def test_numbers_of_another_type_are_refused_by_name() -> None:
    """Regression: C++ read any tensor as bfloat16, even beyond its end."""
    x, weights = torch.randn(64, 32).bfloat16(), [torch.randn(2, 32, 32), torch.randn(2, 32, 32)]
    with pytest.raises(RuntimeError, match="a tensor's numbers do not have type BFloat16"):
        kernels.experts_forward(x, torch.rand(64, 2), torch.ones(64, 2, dtype=torch.bool), weights, kernels.NONE)
    with pytest.raises(RuntimeError, match="missing value for argument 'room'"):
        kernels.experts_forward(x, None, None, weights)  # type: ignore[call-arg]

"""The layer against its equation, its options, and the state of its rule."""

from __future__ import annotations

import functools
import math
import operator
import re
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from cases import TRAINED
from created import created_by
from expert_threshold.moe import MoE
from expert_threshold.moe.router import _Scores, exact_parts
from expert_threshold.routing import RULES as NAMED
from expert_threshold.routing import ExpertChoice, ExpertThreshold, Rule, TokenChoice
from routed_sum import Case, by_loops, feed_forward_by_hand

RULES = {name: rule for name, rule in TRAINED.items() if rule} | {
    "unbounded": ExpertThreshold(4, 2, decay=0.5, warmup_steps=0, capacity_slack=None),
    "warmup": ExpertThreshold(4, 1, decay=0.5, warmup_steps=9),
}
CASES = {f"{name}, {case}": rule for name, cls in NAMED.items() for case, rule in cls.cases().items()}
ANY_LENGTH = {case: rule for case, rule in CASES.items() if not isinstance(getattr(rule, "pool", None), int)}
rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


def moe_with_history(rule: Rule, **options: Any) -> MoE:
    """Return a layer after a few updates of its rule."""
    torch.manual_seed(3)
    moe = MoE(8, 12, rule, **options)
    for _ in range(3):
        moe.router.update(moe(torch.randn(3, 8, 8))[1])
    return moe


def state_of(moe: MoE) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in moe.router.state._asdict().items()}


def assert_same_state(found: MoE, expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(state_of(found), expected, atol=0, rtol=0)


def by_hand(moe: MoE, x: Tensor) -> Tensor:
    """y_t = shared(x_t) + Σ_i z[t,i] · σ(r[t,i]) · expert_i(x_t) (/ max(fanout, 1)), z as the router says."""
    flat, assignment = x.flatten(0, 1), moe.router(x).assignment.flatten(0, 1)
    gates = (flat @ moe.router.weight.T).sigmoid()
    if moe.gate_norm == "fanout":
        gates = gates / assignment.sum(-1, keepdim=True).clamp(min=1)
    y = by_loops(Case(flat, gates, assignment, moe.experts, flat))
    return (y if moe.shared is None else y + feed_forward_by_hand(moe.shared, flat)).view_as(x)


@rules
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("shared_experts", [0, 2])
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
@pytest.mark.parametrize("gate_norm", [None, "fanout"])
@torch.no_grad()
def test_the_layer_computes_its_equation(
    rule: Rule, training: bool, shared_experts: int, activation: Any, gate_norm: Any
) -> None:
    moe = moe_with_history(rule, shared_experts=shared_experts, activation=activation, gate_norm=gate_norm)
    moe.train(training)
    x = torch.randn(2, 5, 8)
    y, observation = moe(x)
    torch.testing.assert_close(y, by_hand(moe, x), atol=1e-5, rtol=1e-4)
    assert observation.tokens == 10
    assert torch.equal(observation.load, moe.router(x).assignment.sum((0, 1)))


@rules
def test_the_z_loss_is_the_mean_square_of_the_log_sum_of_scores_and_adds_to_the_rules_loss(rule: Rule) -> None:
    with_loss, without = moe_with_history(rule, z_loss=0.01), moe_with_history(rule)
    x = torch.randn(2, 6, 8)
    routing, plain = with_loss.router(x), without.router(x)
    expected = sum(float(row.exp().sum().log()) ** 2 for row in routing.scores.detach().flatten(0, 1))
    found = routing.loss.detach() - (0 if plain.loss is None else plain.loss.detach())
    torch.testing.assert_close(float(found), expected / 12 * 0.01, rtol=1e-4, atol=1e-6)
    with_loss.eval()
    assert with_loss.router(x).loss is None


# How gradients reach the router.


@rules
def test_the_router_learns_through_the_gates_alone(rule: Rule) -> None:
    """dL/dW_r = Σ_t Σ_i z · σ'(r) · ⟨dL/dy_t, expert_i(x_t)⟩ x_tᵀ: nothing from the choice itself."""
    moe = moe_with_history(rule, shared_experts=1, dispatch="reference")
    x, upstream = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    y, _ = moe(x)
    (gradient,) = torch.autograd.grad(y, moe.router.weight, upstream)
    with torch.no_grad():
        routing = moe.router(x)
        flat, expected = x.flatten(0, 1), torch.zeros_like(gradient)
        slope = routing.scores.sigmoid() * (1 - routing.scores.sigmoid()) * routing.assignment
        for i in range(4):
            out = (flat @ moe.experts.up[i].T).relu() ** 2 @ moe.experts.down[i].T
            expected[i] = (slope[..., i].flatten() * (out * upstream.flatten(0, 1)).sum(-1)) @ flat
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-4)


def test_divided_by_the_fanout_the_gates_of_a_token_without_experts_spread_no_nan() -> None:
    moe = moe_with_history(RULES["unbounded"], gate_norm="fanout")
    moe.router.state.mean.fill_(0)
    x = torch.randn(2, 30, 8)
    y, observation = moe(x)
    assert observation.fanout_counts[0] > 0
    for gradient in torch.autograd.grad(y.square().sum(), [*moe.parameters()]):
        assert gradient.isfinite().all()


# Options.


NONSENSE: dict[str, tuple[Any, ...]] = {
    "dispatch": ("fast", "expert_parallel", None), "activation": ("gelu", ["relu2"]), "gate_norm": ("sum",),
    "rule": (None, ExpertThreshold), "shared_experts": (-1, 1.0, True), "d_expert": (0, 2.5), "d_model": (-8,),
    "z_loss": (-0.1, float("nan"), float("inf"), "0.1"),
}  # fmt: skip


@pytest.mark.parametrize(("option", "value"), [(name, value) for name, values in NONSENSE.items() for value in values])
def test_nonsense_is_refused_with_the_option_and_its_value_in_a_line(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{option}={value!r} ")) as error:
        MoE(**({"d_model": 8, "d_expert": 12, "rule": TokenChoice(4, 1)} | {option: value}))
    assert "\n" not in str(error.value)


# Dtypes.


@rules
def test_the_state_is_float32_whatever_the_default_dtype(rule: Rule) -> None:
    """Libraries that load a model in half precision build it under another default dtype."""
    expected = [value.dtype for value in rule.init()]
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            moe = MoE(8, 12, rule)
            y, _ = moe(torch.randn(1, 8, 8))
        finally:
            torch.set_default_dtype(torch.float32)
        assert [value.dtype for value in moe.router.state] == expected
        assert y.dtype == dtype


@rules
def test_scores_are_float32_whatever_the_activations_are(rule: Rule) -> None:
    moe = moe_with_history(rule)
    x = torch.randn(1, 8, 8)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        routing = moe.router(x.to(dtype))
        assert routing.scores.dtype == torch.float32
        torch.testing.assert_close(routing.scores, x.to(dtype).float() @ moe.router.weight.T)
        y, _ = moe(x.to(dtype))
        assert y.dtype == dtype


@rules
@pytest.mark.parametrize("dispatch", ["reference", "grouped"])
def test_under_autocast_experts_compute_in_its_dtype_and_scores_are_not_rounded(rule: Rule, dispatch: str) -> None:
    """Regression: experts computed in float32, which is half as fast. Scores in bfloat16 would tie."""
    moe = moe_with_history(rule, dispatch=dispatch)
    x = torch.randn(2, 8, 8, requires_grad=True)
    expected = moe.compute(x.bfloat16(), moe.router(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert nn.Linear(8, 8)(x).dtype == torch.bfloat16
        under, _ = moe(x)
    assert under.dtype == torch.bfloat16
    assert torch.equal(under, expected)
    assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (under, expected)))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # what the compiler does itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # and this
@pytest.mark.parametrize("rule", ["token_choice_aux", "unbounded"])
def test_compiled_for_any_shape_it_is_the_same(rule: str) -> None:
    plain = moe_with_history(RULES[rule], dispatch="grouped")
    torch.compiler.reset()
    compiled = torch.compile(plain, backend="aot_eager", dynamic=True)
    for shape in ((2, 8, 8), (4, 12, 8)):
        x = torch.randn(shape, requires_grad=True)
        found, expected = compiled(x)[0], plain(x)[0]
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected)]
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("shape", [(8, 8), (2, 3, 7), (8,), (1, 2, 3, 8)])
def test_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"x must have shape (batch, time, d_model=8), not {shape}")):
        MoE(8, 12, TokenChoice(4, 1))(torch.zeros(shape))


# The life of the state.


@rules
def test_forward_leaves_the_state_alone_and_update_moves_it_in_place(rule: Rule) -> None:
    moe = moe_with_history(rule)
    before = state_of(moe)
    addresses = [value.data_ptr() for value in moe.router.state]
    _, observation = moe(torch.randn(2, 8, 8))
    assert_same_state(moe, before)
    expected = rule.update(moe.router.state, observation)
    moe.router.update(observation)
    assert_same_state(moe, expected._asdict())
    assert [value.data_ptr() for value in moe.router.state] == addresses
    moe.router.reset_state()
    assert_same_state(moe, rule.init()._asdict())
    assert [value.data_ptr() for value in moe.router.state] == addresses


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@rules
def test_an_observation_that_is_not_finite_leaves_the_state_as_it_was(rule: Rule, value: float) -> None:
    moe = moe_with_history(rule)
    before = state_of(moe)
    _, observation = moe(torch.randn(2, 8, 8))
    observation.score_sum[1] = value
    moe.router.update(observation)
    assert_same_state(moe, before)


@rules
def test_a_checkpoint_in_bfloat16_leaves_the_state_its_dtypes(rule: Rule) -> None:
    saved = moe_with_history(rule).bfloat16().state_dict()
    rounded = {name: value.bfloat16() if value.is_floating_point() else value for name, value in saved.items()}
    moe = MoE(8, 12, rule)
    moe.load_state_dict(rounded, assign=True)
    assert moe.router.weight.dtype == torch.bfloat16
    assert [value.dtype for value in moe.router.state] == [value.dtype for value in rule.init()]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rule", ANY_LENGTH.values(), ids=ANY_LENGTH)
def test_masked_tokens_get_zeros_and_change_nothing_for_the_others(rule: Rule, training: bool) -> None:
    moe = moe_with_history(rule, shared_experts=1).train(training)
    x = torch.randn(3, 12, 8)
    mask = torch.arange(12) < torch.tensor([12, 9, 12])[:, None]
    mask[2, :4] = False  # padded on the left
    x[~mask] = math.nan
    if rule.scope(training) == "sequence":
        alone = [moe(row[counts][None], record=True) for row, counts in zip(x, mask, strict=True)]
    else:
        alone = [moe(x[mask][None], record=True)]
    expected = torch.cat([y[0] for y, _ in alone])
    y, routing = moe(x, mask=mask, record=True)
    torch.testing.assert_close(y[mask], expected)
    assert not y[~mask].any()
    assert not routing.assignment[~mask].any()
    observed = functools.reduce(operator.add, [routing.observation for _, routing in alone])
    torch.testing.assert_close(routing.observation.tensors(), observed.tensors())
    assert (routing.loss is None) == (alone[0][1].loss is None)
    if routing.loss is not None:
        torch.testing.assert_close(routing.loss, alone[0][1].loss)
    parameters = list(moe.parameters())
    factors = torch.randn_like(expected)
    of_masked = torch.autograd.grad((y[mask] * factors).sum(), parameters)
    of_alone = torch.autograd.grad((expected * factors).sum(), parameters)
    torch.testing.assert_close(of_masked, of_alone)


@pytest.mark.parametrize(
    "rule", [ExpertChoice(4, 1), ExpertThreshold(4, 1, warmup_steps=0, capacity_slack=None, pool="sequence")]
)
def test_a_mask_of_all_tokens_changes_no_pool(rule: Rule) -> None:
    moe, x, mask = MoE(8, 12, rule), torch.randn(3, 16, 8), torch.ones(3, 16, dtype=torch.bool)
    torch.testing.assert_close(moe(x, mask=mask)[1].batch_cutoff, moe(x)[1].batch_cutoff)
    assert moe(x[:0], mask=mask[:0])[0].shape == (0, 16, 8)


@pytest.mark.parametrize("mask", [torch.ones(2, 3), torch.ones(3, 2, dtype=torch.bool)])
def test_a_mask_of_another_shape_or_dtype_is_refused(mask: Tensor) -> None:
    with pytest.raises(ValueError, match="mask"):
        MoE(8, 12, TokenChoice(4, 1))(torch.randn(2, 3, 8), mask=mask)


def test_three_bfloat16_parts_are_a_float32_exactly() -> None:
    powers = torch.randint(-80, 80, (4000,), generator=torch.Generator().manual_seed(0))
    x = torch.randn(4000, generator=torch.Generator().manual_seed(1)) * 2.0**powers
    assert torch.equal(exact_parts(x).float().flip(0).sum(0), x)


def test_on_a_gpu_scores_are_float32_and_narrow_rows_are_never_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: rows were copied to float32 and multiplied without tensor cores."""
    x, weight, dscores = torch.randn(2, 50, 16).bfloat16(), torch.randn(4, 16), torch.randn(2, 50, 4)

    def products() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            context = mock.Mock(saved_tensors=(x, weight))
            return _Scores.forward(context, x, weight), _Scores.backward(context, dscores)[1]

    expected = products()
    monkeypatch.setattr("expert_threshold.moe.router._on_tensor_cores", lambda _: True)
    wide = []

    def multiply(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        """Stand in for the GPU's product, whose terms are exact."""
        wide.extend([a.dtype, b.dtype])
        return (a.double() @ b.double()).to(out_dtype)

    monkeypatch.setattr(torch, "mm", multiply)
    torch.testing.assert_close(products(), expected, atol=1e-5, rtol=1e-5)
    assert set(wide) == {torch.bfloat16}
    assert (torch.float32, x.numel()) not in created_by(products)

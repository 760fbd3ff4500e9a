"""Every backend against `reference`, which is itself held against plain loops and finite differences."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from created import created_by
from expert_threshold.kernels import cpu
from expert_threshold.kernels.activation import ActivationName
from expert_threshold.kernels.segments import segments
from expert_threshold.moe import BACKENDS, Experts, FeedForward, backends
from expert_threshold.moe.backends import FEW, auto
from expert_threshold.moe.backends.grouped import Plan, form_groups, most_slots
from expert_threshold.moe.backends.static import PADDING_PER_BAG, sum_by_token
from expert_threshold.moe.experts import HIDDEN_PER_BLOCK, _FeedForwardFunction, plain
from ranks import run_on_ranks
from rounding import without_kernels
from routed_sum import (
    ASSIGNMENTS,
    EXPERTS,
    REQUIREMENTS,
    Case,
    RoutedSum,
    assert_same,
    by_loops,
    case,
    fanout,
    feed_forward_by_hand,
    outputs_and_gradients,
    requirements,
)

NAMES = ["reference", "grouped", "static"]  # kernels have files of their own, and fewer dtypes
FAST = [name for name in NAMES if name != "reference"]
ACTIVATIONS: list[ActivationName] = ["relu2", "swiglu"]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_a_backend_is_the_sum_over_assigned_experts(name: str, activation: ActivationName) -> None:
    given_case = case(torch.rand(9, EXPERTS, generator=torch.Generator().manual_seed(0)) < 0.5, activation)
    expected = by_loops(given_case)
    torch.testing.assert_close(BACKENDS[name](*given_case[:4]), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.usefixtures("fresh_memory_is_nan")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("assignment", ASSIGNMENTS.values(), ids=ASSIGNMENTS.keys())
@pytest.mark.parametrize("name", FAST)
def test_outputs_and_gradients_equal_the_reference(name: str, assignment: Tensor, activation: ActivationName) -> None:
    given_case = case(assignment, activation)
    expected = outputs_and_gradients(BACKENDS["reference"], given_case)
    assert_same(outputs_and_gradients(BACKENDS[name], given_case), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("assignment", [*ASSIGNMENTS.values(), fanout(2 * FEW, EXPERTS, 2)], ids=[*ASSIGNMENTS, "more"])
@pytest.mark.parametrize("name", FAST)
@torch.no_grad()
def test_without_gradients_a_backend_equals_the_reference_and_reads_nothing_idle(
    name: str, assignment: Tensor, dtype: torch.dtype, activation: ActivationName
) -> None:
    given_case = case(assignment, activation, dtype)
    x = given_case.x.masked_fill(~assignment.any(-1, keepdim=True), torch.nan)
    gates = given_case.gates.masked_fill(~assignment, torch.nan)
    expected = BACKENDS["reference"](*given_case[:4])
    found = BACKENDS[name](x, gates, assignment, given_case.experts)
    assert found.dtype == dtype
    bound = None if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found, expected, atol=bound, rtol=bound)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.bfloat16, 0.02)], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_dtypes_differ_by_rounding_alone(
    name: str, activation: ActivationName, dtype: torch.dtype, bound: float
) -> None:
    exact = outputs_and_gradients(BACKENDS["reference"], case(fanout(7, EXPERTS, 2), activation, torch.float64))
    found = outputs_and_gradients(BACKENDS[name], case(fanout(7, EXPERTS, 2), activation, dtype))
    assert found["y"].dtype == found["x"].dtype == dtype
    assert found["gates"].dtype == found["up"].dtype == torch.float32
    for key, value in exact.items():  # a product of a few factors, each rounded; gradients of weights are float32
        limit = bound if key in ("y", "x") else max(bound, 1e-6)
        assert (found[key].double() - value).norm() <= limit * value.norm(), key


@requirements
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_every_backend_meets_every_requirement(
    name: str, activation: ActivationName, require: Callable[[RoutedSum, Case], None]
) -> None:
    if name == "reference" and require is REQUIREMENTS["a_second_derivative_is_refused_rather_than_wrong"]:
        pytest.skip("torch differentiates its plain operations twice")
    require(BACKENDS[name], case(fanout(8, EXPERTS, 2), activation))


@pytest.mark.parametrize("name", [*NAMES, "auto"])
def test_what_shared_experts_make_is_added_and_a_hook_on_them_fires(name: str) -> None:
    given_case, shared = case(fanout(6, EXPERTS, 2)), FeedForward(8, 12)
    assert plain(shared)
    called: list[bool] = []
    shared.register_forward_hook(lambda *_: called.append(True))
    assert not plain(shared)
    expected = BACKENDS["reference"](*given_case[:4]) + feed_forward_by_hand(shared, given_case.x)
    torch.testing.assert_close(BACKENDS[name](*given_case[:4], shared), expected, atol=1e-6, rtol=1e-5)
    assert called


@pytest.mark.usefixtures("fresh_memory_is_nan")
@pytest.mark.parametrize("surplus", [0, 1, 17, 200])
def test_rows_beyond_those_in_use_are_in_no_sum(surplus: int) -> None:
    given_case = case(torch.rand(9, EXPERTS, generator=torch.Generator().manual_seed(0)) < 0.4)
    padded = functools.partial(BACKENDS["static"], rows=int(given_case.assignment.sum()) + surplus)
    expected = outputs_and_gradients(BACKENDS["reference"], given_case)
    assert_same(outputs_and_gradients(padded, given_case), expected)


def test_too_few_rows_are_refused_rather_than_dropped() -> None:
    assignment = torch.ones(3, 4, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="more token-expert pairs than the 11 rows"):
        BACKENDS["static"](torch.randn(3, 8), torch.rand(3, 4), assignment, Experts(4, 8, 12), rows=11)


def test_no_integer_is_made_for_every_token_and_expert() -> None:
    """Regression: about 25 passes over such integers took most of the time with many experts."""
    assignment = torch.rand(64, 32, generator=torch.Generator().manual_seed(0)) < 1 / 32
    made = created_by(lambda: segments(assignment, 96))
    assert max(size for dtype, size in made if dtype != torch.bool) < assignment.numel()


def test_no_bag_of_padding_is_long() -> None:
    """Regression: CUDA sums a bag sequentially, and all padding was in one bag."""
    packed = segments(fanout(6, EXPERTS, 2), 2 * 6 + 1000)
    with mock.patch.object(torch, "embedding_bag", wraps=torch.embedding_bag) as called:
        sum_by_token(torch.randn(len(packed.token), 3), packed)
    begins = [*called.call_args.args[2].tolist(), len(packed.token)]
    assert max(end - first for first, end in itertools.pairwise(begins)) == PADDING_PER_BAG


def test_a_gpu_computes_all_rows_and_all_experts_at_once() -> None:
    """Regression: blocks were sized for the host's cache, and each block rounded the weight gradients."""
    parts = {}
    for device in ("cpu", "meta"):
        assignment = mock.Mock(is_cpu=device == "cpu")
        assignment.sum(0).tolist.return_value = [3125] * 16
        with mock.patch("expert_threshold.moe.backends.grouped.pack"):
            groups = Plan.of(assignment, 4096).groups
        parts[device] = len(_FeedForwardFunction.blocks(torch.empty(50_000, 8, device=device), 4096)), len(groups)
    assert parts["meta"] == (1, 1)
    assert min(parts["cpu"]) > 1


def test_auto_takes_what_pays() -> None:
    """Neither kernels nor static buffers pay in float32 on a processor, whatever the bound on rows."""
    for rows in (None, 12):
        given_case = case(fanout(6, EXPERTS, 2))
        paying = [name for name, each in BACKENDS.items() if each.pays(given_case.x, given_case.experts, rows)]
        assert paying == ["reference", "grouped"]
        expected = BACKENDS["grouped"](*given_case[:4], rows=rows)
        assert torch.equal(auto(*given_case[:4], rows=rows), expected)


HOPPER = (9, 0)  # its compute capability


@pytest.mark.parametrize(
    "setting",
    [
        (1000, 2000, torch.bfloat16, True, HOPPER, "static"),
        (FEW, 2 * FEW, torch.bfloat16, False, HOPPER, "static"),
        (1000, None, torch.bfloat16, False, HOPPER, "static"),
        (1000, None, torch.bfloat16, True, HOPPER, "grouped"),  # a buffer would need rows for every pair
        (FEW, None, torch.bfloat16, False, HOPPER, "reference"),
        (0, 0, torch.bfloat16, False, HOPPER, "reference"),  # PyTorch's kernel refuses to sum over no rows
        (1000, 2000, torch.float32, False, HOPPER, "grouped"),  # no kernel multiplies its segments
        (1000, 2000, torch.bfloat16, False, (8, 0), "grouped"),
        (1000, 2000, torch.bfloat16, False, (10, 0), "grouped"),  # gradients of experts without tokens are not zero
    ],
)
@torch.no_grad()
def test_auto_is_static_on_a_gpu_where_the_products_of_all_experts_are_one_kernel(
    setting: tuple[int, int | None, torch.dtype, bool, tuple[int, int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: without a bound on loads, `auto` chose `grouped`, which also waits but launches more kernels."""
    tokens, rows, dtype, compiling, capability, expected = setting
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with FakeTensorMode():
        x = torch.empty(tokens, 8, dtype=dtype, device="cuda")
    assert auto.chosen(x, Experts(EXPERTS, 8, 16), rows).name == expected


def off_by(factor: float | None) -> Callable[..., Tensor]:
    """Return the reference times a factor, or a failure if the factor is None."""

    def backend(*given: Any, rows: int) -> Tensor:
        if factor is None:
            raise RuntimeError("does not compile")
        return BACKENDS["reference"](*given, rows=rows) * factor

    return backend


@pytest.mark.parametrize(
    ("factors", "milliseconds", "expected"),
    [
        ((1.0, 1.0), (2.0, 1.0), "b"),
        ((1.0, 1.0), (1.0, 2.0), "a"),
        ((1.0, 1.5), (2.0,), "a"),  # fast and wrong
        ((1.0, None), (2.0,), "a"),
        ((None, 1.0), (2.0,), "b"),
        ((None, None), (), "a"),
    ],
)
def test_on_a_gpu_auto_is_the_backend_measured_fastest_there_among_those_that_agree(
    factors: tuple[float | None, ...], milliseconds: tuple[float, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, factor in zip("ab", factors, strict=True):
        monkeypatch.setitem(BACKENDS, name, off_by(factor))
    monkeypatch.setattr(backends, "_milliseconds", mock.Mock(side_effect=milliseconds))
    before = torch.get_rng_state()
    measured = backends._measured.__wrapped__
    found = measured(("a", "b"), torch.device("cpu"), torch.bfloat16, (EXPERTS, 8, 16), "relu2", tokens=64)
    assert found == expected
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # what the compiler does itself
def test_measuring_happens_while_a_graph_is_traced_and_not_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(backends, "_measured", lambda *_: measured.append(float(torch.ones(3).sum())) or "static")

    def call(x: Tensor) -> Tensor:
        return x + len(backends.fastest(("static", "triton"), 0, x.dtype, (4, 8, 16), "relu2"))

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=False)
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 1.0 + len("static")))
    assert measured == [3.0]


def test_kernels_that_cannot_compute_say_why() -> None:
    given_case = case(fanout(6, EXPERTS, 2))
    why = "computes in bfloat16, not in torch.float32" if cpu.available() else "has no kernels here: "
    with pytest.raises(ValueError, match=f"dispatch='cpu' {why}"):
        BACKENDS["cpu"](*given_case[:4])
    with without_kernels(), pytest.raises(ValueError, match="'cpu' has no kernels here: EXPERT_THRESHOLD_NATIVE=0"):
        BACKENDS["cpu"](given_case.x.bfloat16(), *given_case[1:4])
    elsewhere = given_case.x.to("meta")
    assert BACKENDS["cpu"].why_not(elsewhere, given_case.experts) == "needs a CPU; use --device cpu, or dispatch='auto'"


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(0, 5, 8), (5, 0, 8), (8,), (1, 8), (3, 5, 8), (2500, 8)])
def test_a_feed_forward_equals_one_written_by_hand(shape: tuple[int, ...], activation: ActivationName) -> None:
    torch.manual_seed(0)
    layer = FeedForward(8, 12, activation)
    x = torch.randn(shape, requires_grad=True)
    upstream = torch.randn(shape)
    inputs = [x, *layer.parameters()]
    expected = torch.autograd.grad(feed_forward_by_hand(layer, x), inputs, upstream)
    y = layer(x)
    torch.testing.assert_close(y, feed_forward_by_hand(layer, x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(y, inputs, upstream), expected, atol=1e-4, rtol=1e-4)


def test_weight_gradients_of_very_many_bfloat16_rows_stay_exact() -> None:
    torch.manual_seed(0)
    layer = FeedForward(4, 4)
    x = torch.randn(262_144, 4).bfloat16()
    upstream = torch.ones_like(x)
    exact = torch.autograd.grad(layer(x.float()), layer.down.weight, upstream.float())[0]
    rounded = torch.autograd.grad(layer(x), layer.down.weight, upstream)[0]
    assert (rounded - exact).norm() <= 0.01 * exact.norm()


@given(loads=st.lists(st.integers(0, 40), max_size=12), hidden=st.sampled_from([1, 20_000, 60_000]))
def test_groups_hold_every_expert_with_tokens_once_within_memory_and_padding(loads: list[int], hidden: int) -> None:
    groups = form_groups(loads, hidden)
    held = [expert for group in groups for expert in range(group.experts.start, group.experts.stop)]
    assert held == [expert for expert, load in enumerate(loads) if load]
    end = 0
    for group in groups:
        of_group = loads[group.experts]
        assert max(of_group) <= group.length <= 1.125 * max(of_group)
        assert group.slots == slice(end, end := end + group.length * len(of_group))
        if len(of_group) > 1:
            assert group.length * len(of_group) * hidden <= HIDDEN_PER_BLOCK
            assert group.length * len(of_group) <= most_slots(sum(of_group))


def test_experts_share_a_product_only_if_their_loads_are_similar() -> None:
    assert [group.experts for group in form_groups([10, 9, 10, 10], 1)] == [slice(0, 4)]
    assert [group.experts for group in form_groups([10, 9, 10, 1], 1)] == [slice(0, 2), slice(2, 3), slice(3, 4)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_on_several_ranks_equal_those_of_one_process(ranks: int, tmp_path: Path) -> None:
    run_on_ranks(Path(__file__).with_name("across_ranks.py"), ranks, tmp_path)

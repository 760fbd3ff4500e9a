"""The Triton kernels against `reference`, on a GPU or else in Triton's interpreter."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cases import use_one_tile
from expert_threshold.install import install
from expert_threshold.kernels.activation import ActivationName
from expert_threshold.kernels.segments import segments
from expert_threshold.moe import BACKENDS, Experts
from expert_threshold.moe.backends import reference
from routed_sum import ASSIGNMENTS, EXPERTS, REQUIREMENTS, Case, assert_same, case, fanout, outputs_and_gradients

pytest.importorskip("triton", reason="triton is not installed: pip install -e '.[triton]'")
from expert_threshold.kernels.gpu import experts as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cuda":
    use_one_tile()
needs_a_device = pytest.mark.skipif(
    DEVICE == "cpu" and not kernels.INTERPRETED,
    reason="there is no GPU, and triton was imported without TRITON_INTERPRET=1",
)
SIZES = {"within a tile": (8, 12), "whole tiles": (32, 64), "parts of tiles": (20, 37), "a single column": (1, 1)}
PADDING = 19  # rows more than needed
NARROW = [(torch.float16, 0.003, "relu2"), (torch.bfloat16, 0.02, "swiglu")]


def padded(x: Tensor, gates: Tensor, assignment: Tensor, experts: Experts, rows: int | None = None) -> Tensor:
    return BACKENDS["triton"](x, gates, assignment, experts, rows=int(assignment.sum()) + PADDING)


def on_device(given: Case) -> Case:
    return Case(*(value.to(DEVICE) for value in given))


def with_exact_sums(given: Case) -> Case:
    """The case with whole numbers and gates of 1/4 to 1 in the interpreter, where numpy multiplies blocks and rounds by
    their shape: so no sum is rounded, and bits tell of the kernels' order of work. On a GPU the case as it is.
    """
    if not kernels.INTERPRETED:
        return given
    with torch.no_grad():
        for weight in given.experts.parameters():
            weight.copy_(weight.sign())
    gates = (given.gates * 4).ceil() / 4
    return given._replace(x=given.x.sign(), upstream=given.upstream.sign(), gates=gates)


def random(tokens: int, experts: int, usage: float = 0.5) -> Tensor:
    return torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens)) < usage


@needs_a_device
@pytest.mark.parametrize(
    ("activation", "assignment"),
    [
        pytest.param(activation, assignment, id=f"{activation}, {name}")
        for name, assignment in ASSIGNMENTS.items()
        for activation in ("relu2", "swiglu")
        if activation == "relu2" or name in ("no token at all", "one empty expert", f"fanout 2 of {EXPERTS}")
    ],
)
def test_outputs_and_gradients_equal_the_reference(activation: ActivationName, assignment: Tensor) -> None:
    given = on_device(case(assignment, activation))
    assert_same(outputs_and_gradients(padded, given), outputs_and_gradients(reference, given))


@needs_a_device
@pytest.mark.parametrize(("d_model", "d_expert"), SIZES.values(), ids=SIZES.keys())
def test_sizes_need_be_no_multiples_of_tiles(d_model: int, d_expert: int) -> None:
    given = on_device(case(random(37, 3), d_model=d_model, d_expert=d_expert))
    assert_same(outputs_and_gradients(padded, given), outputs_and_gradients(reference, given))


@needs_a_device
@pytest.mark.parametrize(("dtype", "tolerance", "activation"), NARROW)
def test_narrow_rows_differ_by_rounding_alone(dtype: torch.dtype, tolerance: float, activation: ActivationName) -> None:
    given = on_device(case(random(20, 3), activation, d_model=20, d_expert=37))
    exact = outputs_and_gradients(reference, given)
    found = outputs_and_gradients(padded, given._replace(x=given.x.to(dtype), upstream=given.upstream.to(dtype)))
    assert found["y"].dtype == found["x"].dtype == dtype
    assert found["gates"].dtype == found["up"].dtype == torch.float32
    for key, value in exact.items():
        assert (found[key].float() - value).norm() <= tolerance * value.norm(), key


IDLE = REQUIREMENTS["nan_in_what_no_expert_reads_reaches_nothing"]


@needs_a_device
@pytest.mark.usefixtures("fresh_memory_is_nan")  # so is padding
@pytest.mark.parametrize(("activation", "require"), [*(("relu2", r) for r in REQUIREMENTS.values()), ("swiglu", IDLE)])
def test_kernels_meet_every_requirement(activation: ActivationName, require: Callable[..., None]) -> None:
    require(padded, on_device(case(fanout(8, EXPERTS, 2), activation)))


@needs_a_device
def test_two_runs_give_the_same_bits_however_much_padding_there_is() -> None:
    given = on_device(case(random(24, EXPERTS), d_model=20, d_expert=37))
    once = outputs_and_gradients(padded, given)
    assert_same(outputs_and_gradients(padded, given), once, atol=0, rtol=0)
    assert_same(outputs_and_gradients(BACKENDS["triton"], given), once, atol=0, rtol=0)


@needs_a_device
def test_no_bit_depends_on_the_size_of_tiles_which_is_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    given = on_device(with_exact_sums(case(random(24, EXPERTS), d_model=20, d_expert=37)))
    expected = outputs_and_gradients(padded, given)
    monkeypatch.setattr(kernels, "FIXED", {"tile_m": 32, "tile_n": 64 if kernels.INTERPRETED else 32})
    assert_same(outputs_and_gradients(padded, given), expected, atol=0, rtol=0)


@needs_a_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    given = on_device(with_exact_sums(case(random(24, EXPERTS), dtype=dtype, d_model=20, d_expert=37)))
    together = outputs_and_gradients(padded, given)
    for token in (0, 23):
        own = slice(token, token + 1)
        parts = {key: getattr(given, key)[own] for key in ("x", "gates", "assignment", "upstream")}
        found = outputs_and_gradients(padded, given._replace(**parts))
        for key in ("y", "x", "gates"):
            assert torch.equal(found[key], together[key][own]), (token, key)


@needs_a_device
def test_the_operators_are_fit_for_the_compiler() -> None:
    given = on_device(case(fanout(6, EXPERTS, 2)))
    packed = segments(given.assignment, 12)  # without padding, which comes out as anything
    tensors = (given.x, given.gates, [*packed], given.experts.up.detach(), given.experts.down.detach())
    torch.library.opcheck(kernels.triton_forward, tensors)
    _, kept = kernels.triton_forward(*tensors)
    torch.library.opcheck(kernels.triton_backward, (given.upstream, *tensors, kept))


@needs_a_device
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # what the compiler does itself
def test_compiled_it_is_one_graph_with_the_same_bits() -> None:
    given = on_device(case(fanout(6, EXPERTS, 2)))

    def bounded(x: Tensor, gates: Tensor, assignment: Tensor, experts: Experts, rows: int | None = None) -> Tensor:
        return BACKENDS["triton"](x, gates, assignment, experts, rows=12 + PADDING)

    torch.compiler.reset()
    compiled = torch.compile(bounded, fullgraph=True, backend="aot_eager", dynamic=False)
    assert_same(outputs_and_gradients(compiled, given), outputs_and_gradients(padded, given), atol=0, rtol=0)


@needs_a_device
def test_float64_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"not in torch.float64; use dispatch='grouped'"):
        padded(*on_device(case(fanout(4, EXPERTS, 2), dtype=torch.float64))[:4])


def test_on_a_cpu_another_dispatch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    with pytest.raises(ValueError, match="needs a CUDA GPU, not 'cpu'; use dispatch='auto'"):
        padded(*case(fanout(4, EXPERTS, 2))[:4])


def test_without_triton_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, kernels.__name__)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ValueError, match=re.escape(f"needs triton, which is missing; run: {install('triton')}")):
        padded(*case(fanout(4, EXPERTS, 2))[:4])

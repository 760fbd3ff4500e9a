"""The table of overrides, operations × properties: where each applies, who uses it, and its signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from expert_threshold.generate import decoder
from expert_threshold.kernels.cpu import blocks, build
from expert_threshold.kernels.cpu.blocks import NONE, OVERRIDES, Override, override
from expert_threshold.model.attention import Attention, norm, rotary
from expert_threshold.model.cross_entropy import linear_cross_entropy
from expert_threshold.moe import FeedForward, MoE
from expert_threshold.optim import Muon
from expert_threshold.routing import ExpertChoice
from rounding import without_kernels

pytestmark = pytest.mark.usefixtures("block_kernels")

ROWS, WEIGHT = torch.randn(128, 64).bfloat16(), torch.zeros(2, 64, 32)
ODD, FEW = torch.randn(128, 40).bfloat16(), ROWS[:63]
# What each operation is asked with: first what its kernel takes, then what it leaves to the plain body.
GIVEN: dict[str, list[tuple[Any, ...]]] = {
    "attention": [(ROWS.view(2, 16, 4, 64),), (ODD,), (FEW,), (ROWS.float(),), (ROWS.to("meta"),)],
    "norm": [(ROWS,), (ODD,), (FEW,), (ROWS.float(),), (ROWS.to("meta"),)],
    **{
        name: [
            (ROWS, 64, "relu2"),
            *((ROWS, hidden, activation) for hidden, activation in ((64, "swiglu"), (40, "relu2"), (1 << 20, "relu2"))),
            *((x, 64, "relu2") for x in (ODD, FEW, ROWS.float(), ROWS.to("meta"))),
        ]
        for name in ("feed_forward", "routed_sum")
    },
    "cross_entropy": [
        (ROWS, torch.zeros(96, 64), 15.0),
        (ROWS, torch.zeros(96, 64), 120.0),
        *((x, torch.zeros(96, 64), 15.0) for x in (ROWS.float(), ROWS[:0])),
        *((ROWS, torch.zeros(words, 64), 15.0) for words in (100, 0)),
    ],
    "muon": [
        (WEIGHT, [WEIGHT], torch.bfloat16),
        (WEIGHT, [WEIGHT], torch.float32),
        *((weight, [weight], torch.bfloat16) for weight in (WEIGHT[:, :63], WEIGHT.mT, WEIGHT.to("meta"))),
        *((WEIGHT, [state], torch.bfloat16) for state in (WEIGHT.mT.contiguous().mT, WEIGHT.bfloat16())),
        *((torch.empty(shape), [], torch.bfloat16) for shape in ((2048, 1024), (1, 2**16))),
    ],
}


def test_each_takes_what_it_can_and_leaves_the_rest() -> None:
    assert GIVEN.keys() == OVERRIDES.keys()
    for name, (taken, *left) in GIVEN.items():
        assert override(name, *taken) is OVERRIDES[name].kernel
        assert [override(name, *given) for given in left] == [None] * len(left), name
    assert override("cross_entropy", ROWS[:1], torch.zeros(96, 64), 15.0) is not None
    assert override("muon", torch.zeros(5, 3), [], torch.bfloat16) is not None  # filled up to whole tiles


def test_one_switch_turns_all_off() -> None:
    def some() -> set[bool]:
        decodes = set() if build.missing() else {decoder.library() is not None}
        return decodes | {override(name, *taken) is not None for name, (taken, *_) in GIVEN.items()}

    assert some() == {True}
    with without_kernels():
        assert some() == {False}


def step_of_muon() -> None:
    weight = nn.Parameter(torch.zeros(32, 32))
    weight.grad = torch.ones(32, 32)
    Muon([weight], ns_dtype=torch.bfloat16).step()


def loss() -> None:
    linear_cross_entropy(ROWS, torch.zeros(96, 64), torch.zeros(128, dtype=torch.int64), 15.0)


USES: dict[str, Callable[[], Any]] = {
    "attention": lambda: Attention(64, 2, 1)(ROWS[None], *rotary(torch.arange(128.0), 32), None, 0),
    "norm": lambda: norm(ROWS),
    "feed_forward": lambda: FeedForward(64, 32)(ROWS),
    "routed_sum": lambda: MoE(64, 32, ExpertChoice(4, 1), shared_experts=0)(ROWS[None]),
    "cross_entropy": loss,
    "muon": step_of_muon,
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_models_and_optimizers_use_the_table(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    takes, whole = OVERRIDES[name]
    monkeypatch.setitem(OVERRIDES, name, Override(takes, lambda *given: used.append(name) or whole(*given)))
    USES[name]()
    assert used == [name]


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    x = torch.randn(64, 128).bfloat16().requires_grad_()
    angles = [t.bfloat16() for t in rotary(torch.arange(64.0), 32)]
    for y in (blocks.attention(x.view(1, 64, 4, 32), *angles, 1), blocks.norm(x)):
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(y.sum(), x, create_graph=True)


def test_the_tracers_idea_of_the_operators_is_what_they_do() -> None:
    torch.manual_seed(0)
    projected, dy = torch.randn(1, 66, 4, 32).bfloat16(), torch.randn(1, 66, 2, 32).bfloat16()
    cos, sin = (t.bfloat16() for t in rotary(torch.arange(66.0), 32))
    calls: list[tuple[Any, ...]] = [
        (blocks.attention_forward, projected, cos, sin, 1, 30, True),
        (
            blocks.attention_backward, dy, projected, cos, sin,
            *blocks.attention_forward(projected, cos, sin, 1, 30, True), 30, True,
        ),
        (blocks.norm, ROWS),
        (blocks.norm_backward, ROWS, ROWS),
    ]  # fmt: skip
    x, gates, everywhere = torch.randn(96, 64).bfloat16(), torch.rand(96, 3), torch.ones(96, 3, dtype=torch.bool)
    up, down = torch.randn(3, 32, 64).bfloat16(), torch.randn(3, 64, 32).bfloat16()
    routed, shared = torch.rand(300, 32).bfloat16(), torch.rand(96, 32).bfloat16()
    for routing, weights, kept in (
        ((gates, everywhere), [up, down], [routed]),
        ((None, None), [up[:1], down[:1]], [shared]),
        ((gates, everywhere), [up, down, up[:1], down[:1]], [routed, shared]),
    ):
        calls += [(blocks.experts_forward, x, *routing, weights, room) for room in (300, NONE)]
        calls += [(blocks.experts_backward, x, x, *routing, weights, kept)]
    for operator, *given in calls:
        torch.library.opcheck(operator, tuple(given), test_utils=("test_schema", "test_faketensor"))

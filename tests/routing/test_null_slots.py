"""Null slots: by their definition, equal to the published code, and steered to a mean fanout and even loads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from torch import Tensor

from expert_threshold import MoE
from expert_threshold.routing import NullSlots, NullSlotState

EXPERTS, NULL, SLOTS = 6, 4, 3


def make_scores(seed: int = 0) -> Tensor:
    return torch.randn(3, 16, EXPERTS + NULL, generator=torch.Generator().manual_seed(seed))


def rule_of(null: Literal["zero", "copy"] = "zero", **options: float) -> NullSlots:
    return NullSlots(EXPERTS, 1.5, null_slots=NULL, slots_per_token=SLOTS, null=null, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("training", [True, False])
def test_slots_and_gates_are_those_of_the_published_router(training: bool) -> None:
    models = pytest.importorskip("transformers.models.longcat_flash.modeling_longcat_flash")
    config = SimpleNamespace(
        hidden_size=EXPERTS + NULL, num_experts_per_tok=SLOTS, num_local_experts=EXPERTS, n_routed_experts=EXPERTS,
        zero_expert_num=NULL, routed_scaling_factor=2.5,
    )  # fmt: skip
    router = models.LongcatFlashTopkRouter(config)
    bias = torch.randn(EXPERTS + NULL, generator=torch.Generator().manual_seed(9)) / 20
    router.e_score_correction_bias.copy_(bias)
    torch.nn.init.eye_(router.classifier.weight)
    scores = make_scores()
    routing = rule_of("copy", gate_scale=2.5).route(scores, NullSlotState(bias), training=training)
    _, weights, chosen = router(scores)
    theirs = torch.zeros(chosen.shape[0], EXPERTS + NULL).scatter(1, chosen, weights).view_as(scores)
    assert torch.equal(routing.assignment, theirs[..., :EXPERTS] > 0)
    torch.testing.assert_close(routing.gates * routing.assignment, theirs[..., :EXPERTS])
    assert routing.passthrough is not None
    torch.testing.assert_close(routing.passthrough, theirs[..., EXPERTS:].sum(-1))
    assert int(routing.observation.null_load.sum()) == int((theirs[..., EXPERTS:] > 0).sum())


def test_a_layer_adds_copies_of_the_token_and_nothing_for_zeros() -> None:
    torch.manual_seed(0)
    zero, copy = (MoE(8, 12, rule_of(null), shared_experts=0) for null in ("zero", "copy"))  # type: ignore[arg-type]
    copy.load_state_dict(zero.state_dict())
    x = torch.randn(2, 5, 8)
    passthrough = copy.router(x).passthrough
    assert passthrough is not None
    assert zero.router(x).passthrough is None
    y, _ = copy(x)
    torch.testing.assert_close(y, zero(x)[0] + passthrough[..., None] * x)
    (gradient,) = torch.autograd.grad(y.sum(), copy.router.weight)
    assert gradient[EXPERTS:].any(1).all()  # the slots' own rows learn


@pytest.mark.parametrize("fanout", [0.5, 1, 2.5])
def test_biases_bring_the_mean_fanout_and_the_loads_to_where_they_aim(fanout: float) -> None:
    rule = NullSlots(EXPERTS, fanout, null_slots=NULL, slots_per_token=SLOTS, bias_rate=0.002)
    state, popular = rule.init(), torch.linspace(-1, 1, EXPERTS + NULL)
    for step in range(400):
        scores = torch.randn(8, 64, EXPERTS + NULL, generator=torch.Generator().manual_seed(step)) + popular
        seen = rule.route(scores, state, training=True).observation
        state = rule.update(state, seen)
    assert float(seen.fanout_mean) == pytest.approx(fanout, rel=0.1)
    assert float(seen.load.max() / seen.load.float().mean()) < 1.3
    share = rule.measure(state, seen)["null_share"]
    assert float(share) == pytest.approx(1 - float(seen.fanout_mean) / SLOTS, abs=1e-6)

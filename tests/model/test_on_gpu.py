"""The whole model on CUDA: nothing waits for the device, and a step can be captured in a graph."""

from __future__ import annotations

import pytest
import torch

from cases import GPU_RULES, model_and_batch, no_waiting, require_captured_equals_called, step, waits
from expert_threshold.routing import Rule
from expert_threshold.train.device import to_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
WAITS = torch.cuda.is_available() and waits("static")
with_every_rule = pytest.mark.parametrize("rule", GPU_RULES.values(), ids=GPU_RULES.keys())
without_the_host = pytest.mark.parametrize(
    "dispatch",
    [
        pytest.param("static", marks=pytest.mark.skipif(WAITS, reason="it waits for GPUs other than Hopper")),
        "triton",
    ],
)


@without_the_host
@with_every_rule
def test_forward_backward_and_update_wait_for_nothing(rule: Rule | None, dispatch: str) -> None:
    model, tokens, targets = model_and_batch(rule, dispatch, torch.device("cuda"))
    step(model, tokens, targets)  # libraries set themselves up, kernels are tuned
    with no_waiting():
        step(model, tokens, targets)


def test_copying_a_batch_to_the_device_does_not_wait() -> None:
    x = torch.arange(1_000_000)
    with no_waiting():
        copy = to_device(x, torch.device("cuda"))
    assert torch.equal(copy.cpu(), x)


@without_the_host
@with_every_rule
def test_a_captured_step_gives_what_a_called_one_gives(rule: Rule | None, dispatch: str) -> None:
    require_captured_equals_called(rule, dispatch)

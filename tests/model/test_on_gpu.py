"""The whole model on CUDA: nothing waits for the device, and a step can be captured in a graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cases import GPU_RULES, model_and_batch, no_waiting, step, use_one_tile, waits
from expert_threshold.model.attention import _mask, attend
from expert_threshold.moe.router import _Scores
from expert_threshold.routing import Rule
from expert_threshold.train.loop import to_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
if torch.cuda.is_available():
    use_one_tile()
WAITS = torch.cuda.is_available() and waits("static")
with_every_rule = pytest.mark.parametrize("rule", GPU_RULES.values(), ids=GPU_RULES.keys())
without_the_host = pytest.mark.parametrize(
    "dispatch",
    [pytest.param("static", marks=pytest.mark.skipif(WAITS, reason="it waits for GPUs other than Hopper")), "triton"],
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
    """Compares a replay on another batch with a call of a second model."""
    device = torch.device("cuda")
    model, tokens, targets = model_and_batch(rule, dispatch, device)
    other, *_ = model_and_batch(rule, dispatch, device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            step(model, tokens, targets)
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(model, tokens, targets)
    other.load_state_dict(model.state_dict())
    torch.manual_seed(1)
    tokens.copy_(torch.randint_like(tokens, 256))
    for parameter in model.parameters():  # the graph adds to them
        parameter.grad.zero_()
    graph.replay()
    torch.testing.assert_close(loss, step(other, tokens, targets))
    gradients = {name: p.grad for name, p in other.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-2, rtol=1e-2)
    for name, state in model.named_buffers():
        torch.testing.assert_close(state, dict(other.named_buffers())[name])


def test_scores_of_narrow_rows_are_float32() -> None:
    x = torch.randn(4096, 1280, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(16, 1280, device="cuda") / 36).requires_grad_()
    upstream = torch.randn(4096, 16, device="cuda")
    scores = _Scores.apply(x, weight)
    exact = x.double() @ weight.double().T
    assert (scores - exact).norm() <= 1e-6 * exact.norm()
    assert scores.dtype == torch.float32
    (gradient,) = torch.autograd.grad(scores, weight, upstream)
    exact_gradient = upstream.double().T @ x.double()
    assert (gradient - exact_gradient).norm() <= 1e-6 * exact_gradient.norm()


def test_attention_within_a_window_is_the_masked_one() -> None:
    q, k, v = (torch.randn(2, heads, 300, 64, device="cuda").bfloat16().requires_grad_() for heads in (4, 2, 2))
    positions = torch.arange(300, device="cuda")
    mask = _mask(positions[:, None], positions, 70, q.dtype)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    found = attend(q, k, v, window=70)
    upstream = torch.randn_like(found)
    gradients = (torch.autograd.grad(y, (q, k, v), upstream) for y in (found, expected))
    for a, b in zip((found, *next(gradients)), (expected, *next(gradients)), strict=True):
        assert (a - b).norm() <= 0.02 * b.norm()

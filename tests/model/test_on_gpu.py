"""The whole model on CUDA: nothing waits for the device, and a step can be captured in a graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from expert_threshold.model import GPT, GPTConfig
from expert_threshold.routing import ExpertChoice, ExpertThreshold, Rule, TokenChoice

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

RULES: list[Rule | None] = [
    None,
    ExpertThreshold(8, warmup_steps=1),
    ExpertChoice(8, pool="sequence"),
    TokenChoice(8, 2),
]


def model_and_batch(rule: Rule | None, dispatch: str) -> tuple[GPT, Tensor, Tensor]:
    torch.manual_seed(0)
    shape = {"vocab_size": 256, "context": 64, "layers": 3, "d_model": 64, "heads": 2, "kv_heads": 2}
    config = GPTConfig(**shape, d_expert=128, d_feed_forward=256, rule=rule, dispatch=dispatch)  # type: ignore[arg-type]
    model = GPT(config, compute_dtype=torch.bfloat16).cuda()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    tokens = torch.randint(256, (16, 65), device="cuda")
    return model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def step(model: GPT, tokens: Tensor, targets: Tensor) -> Tensor:
    output = model(tokens, targets)
    assert output.loss is not None
    output.loss.backward()
    model.update_rules(output.observations)
    return output.loss.detach()


@pytest.mark.parametrize("dispatch", ["static", "triton"])
@pytest.mark.parametrize("rule", RULES)
def test_forward_backward_and_update_wait_for_nothing(
    rule: Rule | None, dispatch: str, request: pytest.FixtureRequest
) -> None:
    model, tokens, targets = model_and_batch(rule, dispatch)
    step(model, tokens, targets)  # libraries set themselves up, kernels are tuned
    request.getfixturevalue("no_waiting")
    step(model, tokens, targets)


@pytest.mark.parametrize("dispatch", ["static", "triton"])
@pytest.mark.parametrize("rule", RULES)
def test_a_captured_step_gives_what_a_called_one_gives(rule: Rule | None, dispatch: str) -> None:
    model, tokens, targets = model_and_batch(rule, dispatch)
    other, *_ = model_and_batch(rule, dispatch)
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
        assert parameter.grad is not None
        parameter.grad.zero_()
    graph.replay()
    torch.testing.assert_close(loss, step(other, tokens, targets))
    gradients = {name: p.grad for name, p in other.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-2, rtol=1e-2)
    for name, state in model.named_buffers():
        torch.testing.assert_close(state, dict(other.named_buffers())[name])

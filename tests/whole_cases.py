"""A small model and a step of its training, called or captured in a CUDA graph, for tests and benchmarks on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from expert_threshold.model import GPT, GPTConfig
from expert_threshold.routing import ExpertChoice, ExpertThreshold, Rule, TokenChoice

RULES: dict[str, Rule | None] = {
    "dense": None,
    "expert_threshold": ExpertThreshold(8, warmup_steps=1),
    "expert_choice": ExpertChoice(8, pool="sequence"),
    "token_choice": TokenChoice(8, 2),
}


def model_and_batch(
    rule: Rule | None, dispatch: str, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> tuple[GPT, Tensor, Tensor]:
    torch.manual_seed(0)
    shape = {"vocab_size": 256, "context": 64, "layers": 3, "d_model": 64, "heads": 2, "kv_heads": 2}
    config = GPTConfig(**shape, d_expert=128, d_feed_forward=256, rule=rule, dispatch=dispatch)  # type: ignore[arg-type]
    model = GPT(config, compute_dtype=dtype).to(device)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    tokens = torch.randint(256, (16, 65), device=device)
    return model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def step(model: GPT, tokens: Tensor, targets: Tensor, forward: Callable[..., object] | None = None) -> Tensor:
    """Forward, backward and the rules' update; gradients add to those that are there."""
    output = (model if forward is None else forward)(tokens, targets)
    output.loss.backward()  # type: ignore[attr-defined]
    model.update_rules(output.observations)  # type: ignore[attr-defined]
    loss: Tensor = output.loss.detach()  # type: ignore[attr-defined]
    return loss


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device raises RuntimeError."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def require_captured_equals_called(rule: Rule | None, dispatch: str) -> None:
    """Raises AssertionError if a replay on another batch gives other numbers than a call on a second model."""
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
        assert parameter.grad is not None
        parameter.grad.zero_()
    graph.replay()
    torch.testing.assert_close(loss, step(other, tokens, targets))
    gradients = {name: p.grad for name, p in other.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-2, rtol=1e-2)
    for name, state in model.named_buffers():
        torch.testing.assert_close(state, dict(other.named_buffers())[name])

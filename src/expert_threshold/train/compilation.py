"""Decides whether to compile a run's model, and compiles it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ..model import GPT, GPTConfig, Output, flops_per_token
from .config import TrainConfig

# Compiling clearly saves time in runs with at least this many FLOPs. On a CPU, it takes up to a minute and makes steps
# a tenth shorter, or a fifth without our kernels (docs/log/training.md). The value for GPUs has not been measured.
PAYS = {"cpu": 2e14, "cuda": 1e16}
GRAPHS = 64  # the fewest graphs that torch must keep in a process, since `et compare` trains many models in one


def pick_compile(
    model: GPTConfig, config: TrainConfig, device: torch.device, ranks: int, say: Callable[[str], None]
) -> bool:
    """Return True for `on`, and for `auto` if compiling works and saves time. Raises ValueError if `on` cannot work.

    say: prints a line; called before anything slow.
    """
    if config.compile == "off" or (config.compile == "auto" and (ranks > 1 or not _pays(model, config, device))):
        return False
    if ranks > 1:
        raise ValueError("compile='on' is not supported for several processes; use --compile off")
    say("trying torch's compiler, which takes half a minute the first time")
    reason = failure(device)
    if reason is None:
        say("the model is compiled at the first step, which takes up to a minute")
    elif config.compile == "on":
        raise ValueError(f"compile='on' does not work on this machine ({reason}); use --compile off")
    else:
        say(f"the compiler does not work on this machine ({reason}); training without it")
    return reason is None


def compiled(model: GPT) -> Callable[..., Output]:
    """Return the model's forward, compiled with its backward as a single graph, for batches of a single shape."""
    import torch._dynamo  # takes seconds, which other runs save

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    forward: Callable[..., Output] = torch.compile(model, fullgraph=True, dynamic=False)
    return forward


def _pays(model: GPTConfig, config: TrainConfig, device: torch.device) -> bool:
    tokens = config.batch_size * model.context
    if device.type != "cpu" and model.rule is not None and model.rule.max_pairs(tokens, training=True) is None:
        return False  # without a bound, buffers would need room for every token at every expert
    flops = config.steps * config.accumulation * tokens * flops_per_token(model)
    return flops >= PAYS.get(device.type, float("inf"))


@functools.cache
def failure(device: torch.device) -> str | None:
    """Return the reason why torch cannot compile for the device, or None if it can. The first call takes seconds."""
    try:
        torch.compile(lambda x: x.square() + 1, fullgraph=True)(torch.ones(64, device=device))
    except Exception as error:  # a missing or broken compiler can raise anything
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]  # the reason is on the second line
    return None

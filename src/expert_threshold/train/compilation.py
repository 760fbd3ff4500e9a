"""Whether the model of a run is compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ..model import GPT, GPTConfig, Output, flops_per_token
from ..moe import most_pairs
from .config import TrainConfig

# FLOPs of a run from which on compiling takes less time than it saves. Compiling takes half a minute of a CPU and saves
# a third of the time of steps at some 10¹¹ FLOP/s (docs/log.md); of a GPU not measured.
PAYS = {"cpu": 2e13, "cuda": 1e16}


def pick_compile(model: GPTConfig, config: TrainConfig, device: torch.device, ranks: int) -> bool:
    """Whether to compile; `auto` does where it pays and works. Raises ValueError where it is on and cannot be."""
    if config.compile == "auto":
        return ranks == 1 and _pays(model, config, device) and failure(device) is None
    if config.compile == "on":
        if ranks > 1:
            raise ValueError("compile='on': only runs of one process are compiled; give --compile off")
        if (reason := failure(device)) is not None:
            raise ValueError(f"compile='on' does not work on this machine ({reason}); give --compile off")
    return config.compile == "on"


def compiled(model: GPT) -> Callable[..., Output]:
    """Its forward and backward as one graph, for batches of one shape; weights are the model's.

    What was compiled before is forgotten, as the graphs of a process are limited in number.
    """
    torch.compiler.reset()
    forward: Callable[..., Output] = torch.compile(model, fullgraph=True, dynamic=False)
    return forward


def _pays(model: GPTConfig, config: TrainConfig, device: torch.device) -> bool:
    tokens = config.batch_size * model.context
    if model.rule is not None and most_pairs(model.rule, tokens, training=True) is None:
        return False  # buffers would be made for every token at every expert
    flops = config.steps * config.accumulation * tokens * flops_per_token(model)
    return flops >= PAYS.get(device.type, float("inf"))


@functools.cache
def failure(device: torch.device) -> str | None:
    """Why nothing can be compiled for the device; None if it can. Takes seconds the first time."""
    try:
        torch.compile(lambda x: x.square() + 1, fullgraph=True)(torch.ones(64, device=device))
    except Exception as error:  # whatever a compiler that is absent or broken leads to
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return None

"""AdamW, for embeddings, the head and scalars."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT


class AdamW(torch.optim.AdamW):
    """Adam with bias correction, using torch's fused kernel, which is the fastest on CPUs and GPUs.

    The defaults are the paper's. weight_decay: subtracts lr · weight_decay · W before the update. Unlike in torch, it
    is off by default. A parameter's step count only includes steps in which it had a gradient.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        weight_decay: float = 0.0,
    ) -> None:
        first, second = map(float, betas)  # torch rejects integers such as 0
        super().__init__(params, lr, (first, second), eps, weight_decay, fused=True)

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter before its first step."""
        return {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }

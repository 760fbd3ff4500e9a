"""Computes an exported model's experts with this package's backends: `experts_implementation="expert_threshold"`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.activation import Activation, activation_named
from ..moe.backends import auto


class _Weights(NamedTuple):
    """The attributes of `Experts` that backends read. The tensors need not be parameters."""

    activation: Activation
    gate: Tensor | None
    up: Tensor
    down: Tensor

    def ups(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(weight.to(dtype) for weight in (self.gate, self.up) if weight is not None)


def routed_sum(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return Σ_k weights[t,k] · expert_ids[t,k](x_t), computed by the backend that `auto` chooses.

    module: the stacked experts; x: (tokens, d_model); ids and weights: (tokens, K). Pairs with weight 0 are skipped.
    """
    gate, up = module.gate_up_proj.chunk(2, 1) if module.has_gate else (None, module.up_proj)
    experts: Any = _Weights(activation_named("swiglu" if module.has_gate else "relu2"), gate, up, module.down_proj)
    gates = weights.new_zeros(x.shape[0], module.num_experts).scatter(1, ids, weights)
    return auto(x, gates.float(), gates != 0, experts)

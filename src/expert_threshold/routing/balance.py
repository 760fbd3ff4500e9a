"""Load balancing for token choice: auxiliary losses and controlled biases."""

from __future__ import annotations

import torch
from torch import Tensor


def auxiliary_loss(gates: Tensor, load: Tensor, *, strength: float) -> Tensor:
    """Return α Σ_i f_i P_i (paper, Related Work, Load Balancing), differentiable only through the gates.

    gates: (batch, time, experts), computed by `shares_of`; their means over tokens are P_i. load: (experts,), which
    determines f. Under perfect balance, the loss is α Σ_i P_i.
    """
    gates = gates.reshape(-1, gates.shape[-1])
    mean_gate = gates.sum(0) / max(len(gates), 1)
    return strength * (normalised_load(load) * mean_gate).sum()


def normalised_load(load: Tensor) -> Tensor:
    """Return f_i, the load of each expert divided by the mean load. If no token was routed, every f_i is 1."""
    mean = load.sum() / len(load)
    return torch.where(mean > 0, load / mean, 1.0)


def move_bias(bias: Tensor, load: Tensor, *, rate: float, proportional: bool) -> Tensor:
    """Return b_i + u · sign(1 − f_i), or b_i + u · (1 − f_i) (paper, Related Work, Load Balancing)."""
    error = 1 - normalised_load(load)
    return bias + rate * (error if proportional else error.sign())

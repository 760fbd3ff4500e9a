"""Nonlinearities of feed-forwards and their derivatives, for layers and kernels that implement their own backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

ActivationName = Literal["relu2", "swiglu"]


class Activation(NamedTuple):
    """A nonlinearity on pre-activations h (…, rows, width · d_expert) and its derivative, both without autograd.

    keep(h) returns what backward needs and may overwrite h. value(kept) returns the activation a. slope(kept, da)
    returns the gradient of h divided by `scale`, which callers apply to narrower rows, and may overwrite da.
    """

    name: ActivationName
    width: int  # number of matrices before the nonlinearity: 1, or 2 if one gates the other
    scale: int
    keep: Callable[[Tensor], Tensor]
    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]

    def __reduce__(self) -> tuple[Callable[[str], Activation], tuple[ActivationName]]:
        return activation_named, (self.name,)  # so that modules that hold it can be pickled


def _swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate).mul_(up)


def _swiglu_slope(h: Tensor, da: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    dgate = da * up * (sigmoid + silu * (1 - sigmoid))
    return torch.cat((dgate, da * silu), -1)


ACTIVATIONS: dict[str, Activation] = {
    "relu2": Activation("relu2", 1, 2, torch.relu_, torch.square, lambda relu, da: da.mul_(relu)),
    "swiglu": Activation("swiglu", 2, 1, lambda h: h, _swiglu, _swiglu_slope),
}


def activation_named(name: str) -> Activation:
    """Return the activation called `name`. Raises ValueError if there is none."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation={name!r} is unknown; use one of {', '.join(get_args(ActivationName))}")
    return ACTIVATIONS[name]

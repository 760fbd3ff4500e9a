"""Autocast in layers that choose the dtype of their products themselves."""

from __future__ import annotations

import torch
from torch import Tensor


def no_autocast(x: Tensor) -> torch.autocast:
    """Return a context that switches autocast off on the device of x."""
    return torch.autocast(x.device.type, enabled=False)


def as_autocast(x: Tensor) -> Tensor:
    """Return x in the dtype in which `nn.Linear` would multiply it; without autocast x itself."""
    casts = x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type)
    return x.to(torch.get_autocast_dtype(x.device.type)) if casts else x

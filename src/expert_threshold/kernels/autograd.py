"""What hand-written derivatives have in common."""

from __future__ import annotations

import torch


def refuse_second_derivative() -> None:
    """To be called in a hand-written backward: raises RuntimeError under create_graph=True, where it would be wrong."""
    if torch.is_grad_enabled():
        raise RuntimeError("this layer has no second derivative; call backward without create_graph=True")

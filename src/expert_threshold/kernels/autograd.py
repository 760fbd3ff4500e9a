"""Checks shared by hand-written derivatives."""

from __future__ import annotations

import torch


def refuse_second_derivative() -> None:
    """Raise RuntimeError under create_graph=True, where the hand-written backward that calls this would be wrong."""
    if torch.is_grad_enabled():
        raise RuntimeError("this layer has no second derivative; call backward without create_graph=True")

"""Helpers for hand-written derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function


class _NoBackward:
    """Takes the place of a function's context where no backward follows."""

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...


def apply(function: type[Function], *arguments: Any) -> Any:
    """Return function.apply(*arguments); without gradients its forward alone, which costs less for a few rows."""
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(_NoBackward(), *arguments)


def refuse_second_derivative() -> None:
    """Raise RuntimeError under create_graph=True, where the hand-written backward that calls this would be wrong."""
    if torch.is_grad_enabled():
        raise RuntimeError("this layer has no second derivative; call backward without create_graph=True")

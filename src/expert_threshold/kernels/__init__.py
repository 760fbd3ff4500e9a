"""Kernels in C++ (`cpu`) and Triton (`gpu`), behind Python functions and operators.

This module defines the operators of the C++ kernels, and has helpers for layers and kernels that choose the dtype of
their products or implement their own derivatives. Kernels are on unless the environment forbids them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import Function

P = ParamSpec("P")
R = TypeVar("R")
VARIABLE = "EXPERT_THRESHOLD_NATIVE"


def forbidden() -> str | None:
    """Return the environment setting that forbids kernels, or None. Existing decoders keep their kernels."""
    return f"{VARIABLE}=0" if os.environ.get(VARIABLE) == "0" else None


def no_autocast(x: Tensor) -> torch.autocast:
    """Return a context that disables autocast on the device of x."""
    return torch.autocast(x.device.type, enabled=False)


def as_autocast(x: Tensor) -> Tensor:
    """Cast x to the dtype in which `nn.Linear` would multiply it. Without autocast, return x itself."""
    casts = x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type)
    return x.to(torch.get_autocast_dtype(x.device.type)) if casts else x


class _NoBackward:
    """A stand-in for the context of a function that has no backward."""

    def save_for_backward(self, *tensors: Tensor) -> None: ...


def apply(function: type[Function], *arguments: Any) -> Any:
    """Return function.apply(*arguments). Without gradients, just call forward, which is cheaper for few rows."""
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(_NoBackward(), *arguments)


def refuse_second_derivative() -> None:
    """Raise RuntimeError under create_graph=True, where the hand-written backward that calls this would be wrong."""
    if torch.is_grad_enabled():
        raise RuntimeError("this layer has no second derivative; call backward without create_graph=True")


def operator(*mutates: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Turn a function into an operator `expert_threshold::NAME` with the same name and signature.

    Torch's tracer calls its body, which returns tensors without data in the shapes that C++ returns. mutates: the
    arguments that C++ modifies.
    """

    def define(fake: Callable[P, R]) -> Callable[P, R]:
        name = fake.__name__
        torch.library.define(f"expert_threshold::{name}", torch.library.infer_schema(fake, mutates_args=mutates))
        torch.library.register_fake(f"expert_threshold::{name}", cast(Any, fake))
        return cast(Callable[P, R], getattr(torch.ops.expert_threshold, name).default)

    return define

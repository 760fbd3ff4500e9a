"""Kernels in C++ (`cpu`) and Triton (`gpu`), behind Python functions and operators.

This module contains the switch for the C++ kernels, which are on by default, the definition of their operators, and
helpers for layers and kernels that choose the dtype of their products or write their own derivatives.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import Function

P = ParamSpec("P")
R = TypeVar("R")
VARIABLE = "EXPERT_THRESHOLD_NATIVE"
_off = False


def forbidden() -> str | None:
    """Return the environment setting that forbids building and loading kernels, or None."""
    return f"{VARIABLE}=0" if os.environ.get(VARIABLE) == "0" else None


def switched_off() -> str | None:
    """Return why the environment or `off` disables kernels; None if they are on."""
    return "they are switched off" if _off else forbidden()


@contextmanager
def off() -> Iterator[None]:
    """Replace kernels with PyTorch's operations, for comparison; existing decoders keep their kernels."""
    global _off
    before, _off = _off, True
    try:
        yield
    finally:
        _off = before


def no_autocast(x: Tensor) -> torch.autocast:
    """Return a context that disables autocast on the device of x."""
    return torch.autocast(x.device.type, enabled=False)


def as_autocast(x: Tensor) -> Tensor:
    """Return x in the dtype in which `nn.Linear` would multiply it; without autocast, x itself."""
    casts = x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type)
    return x.to(torch.get_autocast_dtype(x.device.type)) if casts else x


class _NoBackward:
    """Stands in for a function's context where no backward follows."""

    def save_for_backward(self, *tensors: Tensor) -> None: ...


def apply(function: type[Function], *arguments: Any) -> Any:
    """Return function.apply(*arguments); without gradients, call only its forward, which is cheaper for a few rows."""
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(_NoBackward(), *arguments)


def refuse_second_derivative() -> None:
    """Raise RuntimeError under create_graph=True, where the hand-written backward that calls this would be wrong."""
    if torch.is_grad_enabled():
        raise RuntimeError("this layer has no second derivative; call backward without create_graph=True")


def operator(*mutates: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Turn a function into the operator `expert_threshold::NAME`, with the function's name and signature.

    Its body serves torch's tracer and returns tensors without data, in the shapes that C++ returns. mutates: the
    arguments that C++ modifies.
    """

    def define(fake: Callable[P, R]) -> Callable[P, R]:
        name = fake.__name__
        torch.library.define(f"expert_threshold::{name}", torch.library.infer_schema(fake, mutates_args=mutates))
        torch.library.register_fake(f"expert_threshold::{name}", cast(Any, fake))
        return cast(Callable[P, R], getattr(torch.ops.expert_threshold, name).default)

    return define

"""Bounds on what rounding to bfloat16 may change, the same for every processor, with kernels and without."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from expert_threshold.kernels import VARIABLE

HALF_A_UNIT = torch.finfo(torch.bfloat16).eps / 2  # the largest relative error of one rounding


def without_kernels() -> AbstractContextManager[Any]:
    return mock.patch.dict(os.environ, {VARIABLE: "0"})


def assert_rounded(found: Tensor, exact: Tensor, times: float, name: str = "") -> None:
    """The error's norm is at most that of numbers each rounded to bfloat16 `times` times, the same way each time."""
    assert found.shape == exact.shape, name
    assert (found.float() - exact.float()).norm() <= times * HALF_A_UNIT * exact.float().norm(), name


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor, upstream: Tensor | None = None) -> list[Tensor]:
    """Return the output and the gradients of the inputs, given the output's gradient `upstream` or a fixed one."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    fixed = torch.linspace(-1, 1, y.numel(), dtype=torch.float32).view(y.shape)
    return [y.detach(), *torch.autograd.grad(y, leaves, (fixed if upstream is None else upstream).to(y.dtype))]

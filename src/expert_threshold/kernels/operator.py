"""Operators that C++ computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def operator(*mutates: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Turn a function into the operator `expert_threshold::NAME`, NAME and schema being those of the function.

    Its body returns tensors without data to torch's tracer, of the shapes that C++ returns them in. mutates: the
    arguments that C++ changes.
    """

    def define(fake: Callable[P, R]) -> Callable[P, R]:
        name = fake.__name__
        torch.library.define(f"expert_threshold::{name}", torch.library.infer_schema(fake, mutates_args=mutates))
        torch.library.register_fake(f"expert_threshold::{name}", cast(Any, fake))
        return cast(Callable[P, R], getattr(torch.ops.expert_threshold, name).default)

    return define

"""Kernels in C++ (`cpu`) and Triton (`gpu`); no caller knows how they are called.

Here alone it is decided whether those that are taken unasked, all in C++, are on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "EXPERT_THRESHOLD_NATIVE"
_off = False


def forbidden() -> str | None:
    """Return what in the environment forbids to build and load kernels; None where nothing does."""
    return f"{VARIABLE}=0" if os.environ.get(VARIABLE) == "0" else None


def switched_off() -> str | None:
    """Return what keeps callers from taking kernels, the environment or `off`; None where they are on."""
    return "they are switched off" if _off else forbidden()


@contextmanager
def off() -> Iterator[None]:
    """Put PyTorch's operations in the place of kernels, to compare; a decoder that exists keeps its own."""
    global _off
    before, _off = _off, True
    try:
        yield
    finally:
        _off = before

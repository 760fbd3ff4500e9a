"""Kernels in C++ (`cpu`) and Triton (`gpu`), behind Python functions and operators.

It holds the switch for the C++ kernels, which are on by default; each kernel's `applies` decides whether it can run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "EXPERT_THRESHOLD_NATIVE"
_off = False


def forbidden() -> str | None:
    """Return the environment setting that forbids building and loading kernels; None if there is none."""
    return f"{VARIABLE}=0" if os.environ.get(VARIABLE) == "0" else None


def switched_off() -> str | None:
    """Return why kernels are off, by the environment or `off`; None if they are on."""
    return "they are switched off" if _off else forbidden()


@contextmanager
def off() -> Iterator[None]:
    """Replace kernels by PyTorch's operations, for comparison; decoders made before keep their kernels."""
    global _off
    before, _off = _off, True
    try:
        yield
    finally:
        _off = before

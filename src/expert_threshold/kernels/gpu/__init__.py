"""Triton kernels for NVIDIA GPUs, behind torch.library operators, which are imported when they are first called."""

from functools import cache
from importlib.util import find_spec

from torch import Tensor


@cache
def has_triton() -> bool:
    """Return True if Triton is installed. PyTorch's builds for NVIDIA GPUs include it."""
    return find_spec("triton") is not None


def applies(x: Tensor) -> bool:
    """Return True if the kernels can run on rows like x."""
    return x.is_cuda and has_triton()

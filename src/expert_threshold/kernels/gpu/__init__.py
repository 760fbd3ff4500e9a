"""Triton kernels for NVIDIA GPUs, behind torch.library operators, which are imported when they are first called."""

from torch import Tensor
from torch.utils._triton import has_triton_package


def applies(x: Tensor) -> bool:
    """Return True if the kernels can run on rows like x. PyTorch's builds for NVIDIA GPUs include Triton."""
    return x.is_cuda and has_triton_package()

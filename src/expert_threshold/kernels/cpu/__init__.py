"""C++ kernels for CPUs.

The kernels multiply bfloat16 matrices block by block, whereas PyTorch's operations write each intermediate to memory.
The kernel of the decoder runs a whole step, which consists of hundreds of operations on a few numbers each. Without a
compiler or a suitable CPU, PyTorch's operations are used.
"""

from .blocks import TILE, available, library, reason

__all__ = ["TILE", "available", "library", "reason"]

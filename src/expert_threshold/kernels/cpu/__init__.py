"""C++ kernels for CPUs.

They multiply bfloat16 matrices block by block, where PyTorch's operations would send each intermediate through memory.
The decoder's kernel runs a whole step, which is hundreds of operations on a few numbers each. Without a compiler or a
suitable CPU, PyTorch's operations take over.
"""

from .blocks import TILE, available, library, reason

__all__ = ["TILE", "available", "library", "reason"]

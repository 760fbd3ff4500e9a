"""What kind of error one is."""

from __future__ import annotations


def is_out_of_memory(error: Exception) -> bool:
    """Return True where memory ended, for Python, NumPy, safetensors or torch, whose CPU allocator has no own error."""
    return isinstance(error, MemoryError) or any(
        words in str(error) for words in ("out of memory", "can't allocate memory")
    )

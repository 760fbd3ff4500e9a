"""Classification of errors."""

from __future__ import annotations


def is_out_of_memory(error: Exception) -> bool:
    """Return True if Python, NumPy, safetensors or torch ran out of memory; torch's CPU allocator has no error type."""
    return isinstance(error, MemoryError) or any(
        words in str(error)
        for words in ("out of memory", "can't allocate memory", "Storage size calculation overflowed")
    )

"""Classifies errors."""

from __future__ import annotations


def is_out_of_memory(error: Exception) -> bool:
    """Return True if Python, NumPy, safetensors or torch ran out of memory, or if sizes overflow torch's integers.

    On a CPU, torch does not define error types for these cases.
    """
    return isinstance(error, MemoryError) or any(
        words in str(error)
        for words in (
            "out of memory",
            "can't allocate memory",
            "Storage size calculation overflowed",
            "numel: integer multiplication overflow",
            "Overflow when unpacking long",
        )
    )

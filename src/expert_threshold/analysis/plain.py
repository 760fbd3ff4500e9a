"""Converts figures' data to and from JSON: floats with six significant digits, null for missing numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

Data = Mapping[str, Any]
"""The JSON-compatible data of a figure."""


class NotShownError(Exception):
    """Raised if a figure does not apply to the runs or lacks data. The message is the reason, without a full stop."""


def plain(value: Any) -> Any:
    """Convert arrays, tensors and tuples to lists, and round floats to six digits. Non-finite floats become None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def array(values: Any) -> np.ndarray:
    """Convert a list that `plain` returned to a float64 array, with NaN for None."""
    return np.array(values, dtype=object).astype(float)

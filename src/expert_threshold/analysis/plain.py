"""Conversion to and from figures' data files: lists of floats with six significant digits, null for missing numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

Data = Mapping[str, Any]
"""The JSON-compatible data of a figure."""


class NotShownError(Exception):
    """A figure does not apply to these runs or lacks data. The message is the reason, without a full stop."""


def plain(value: Any) -> Any:
    """Return lists for arrays, tensors and tuples, floats rounded to six significant digits, None if not finite."""
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
    """Return the float64 array of a list that `plain` returned, NaN for None."""
    return np.array(values, dtype=object).astype(float)

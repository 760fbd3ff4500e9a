"""Numbers as figures' data files hold them: lists of floats of six digits, null where there is no number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

Data = Mapping[str, Any]
"""What a figure is drawn from; JSON has it all."""


def plain(value: Any) -> Any:
    """Arrays, tensors and tuples as lists, every float cut to six digits, None for what is not finite."""
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
    """The float64 array of what `plain` made of one, NaN for None."""
    return np.array(values, dtype=object).astype(float)

"""Training: the loop, what it saves, and what it says."""

from .config import TrainConfig
from .loop import Sample, TrainResult, train

__all__ = ["Sample", "TrainConfig", "TrainResult", "train"]

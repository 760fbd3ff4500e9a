"""Training: `loop.py` is the loop; the other files prepare, evaluate, log and save for it."""

from .config import TrainConfig
from .evaluations import Sample
from .loop import TrainResult, train, train_step

__all__ = ["Sample", "TrainConfig", "TrainResult", "train", "train_step"]

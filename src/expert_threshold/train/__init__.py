"""Training: `loop.py` is the loop; the other files prepare, evaluate, log and save for it."""

from .config import TrainConfig
from .loop import TrainResult, train, train_step
from .prepare import Text, read_text
from .run_log import DivergedError

__all__ = ["DivergedError", "Text", "TrainConfig", "TrainResult", "read_text", "train", "train_step"]

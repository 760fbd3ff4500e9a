"""Trains models. The loop is in `loop.py`; the other files prepare, evaluate, log and save for it."""

from .config import RunConfig, TrainConfig
from .log import DivergedError
from .loop import TrainResult, train, train_step
from .prepare import Text, read_text

__all__ = ["DivergedError", "RunConfig", "Text", "TrainConfig", "TrainResult", "read_text", "train", "train_step"]

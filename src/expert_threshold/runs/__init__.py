"""A run folder: its configuration, metrics and checkpoints."""

from .checkpoint import Checkpoint
from .folder import RunFolder
from .load import load_model
from .metrics import Metrics

__all__ = ["Checkpoint", "Metrics", "RunFolder", "load_model"]

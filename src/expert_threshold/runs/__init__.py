"""Reads and writes run folders, which contain a run's configuration, metrics and checkpoints."""

from .checkpoint import Checkpoint, Fingerprints, Part
from .folder import RunFolder, load_model
from .metrics import Metrics

__all__ = ["Checkpoint", "Fingerprints", "Metrics", "Part", "RunFolder", "load_model"]

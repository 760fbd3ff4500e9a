"""Provides optimizers and their schedules: Muon for matrices, and AdamW for the embedding and the head."""

from .adamw import AdamW
from .config import NANOCHAT, RELEASE, TUNED, OptimConfig
from .groups import Group, Optimizers, make_optimizers, moves_matrices
from .muon import Muon, fast_dtype, orthogonalize

__all__ = [
    "NANOCHAT", "RELEASE", "TUNED", "AdamW", "Group", "Muon", "OptimConfig", "Optimizers", "fast_dtype",
    "make_optimizers", "moves_matrices", "orthogonalize",
]  # fmt: skip

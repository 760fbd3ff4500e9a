"""Optimizers: Muon for matrices, AdamW for the embedding and the head, and their schedules."""

from .adamw import AdamW
from .groups import RELEASE, Group, OptimConfig, Optimizers, OptimizerState, make_optimizers, moves_matrices
from .muon import Muon, fast_dtype, newton_schulz

__all__ = [
    "RELEASE",
    "AdamW",
    "Group",
    "Muon",
    "OptimConfig",
    "OptimizerState",
    "Optimizers",
    "fast_dtype",
    "make_optimizers",
    "moves_matrices",
    "newton_schulz",
]

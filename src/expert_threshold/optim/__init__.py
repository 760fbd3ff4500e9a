"""Optimizers: Muon for matrices, AdamW for the embedding and the head, and their schedules."""

from .adamw import AdamW
from .groups import RELEASE, Group, OptimConfig, Optimizers, OptimizerState, make_optimizers, moves_matrices
from .muon import Muon, fast_dtype, newton_schulz
from .shares import Member, Replicated, Shares, Slice, Unshared, whole

__all__ = [
    "RELEASE",
    "AdamW",
    "Group",
    "Member",
    "Muon",
    "OptimConfig",
    "OptimizerState",
    "Optimizers",
    "Replicated",
    "Shares",
    "Slice",
    "Unshared",
    "fast_dtype",
    "make_optimizers",
    "moves_matrices",
    "newton_schulz",
    "whole",
]

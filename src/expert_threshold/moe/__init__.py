"""The Mixture-of-Experts layer and the ways to compute it; with what its users need of the routing rules."""

from ..routing import (
    RULES,
    ExpertThreshold,
    Observation,
    Routing,
    Rule,
    all_finite,
    chooses_on_rank,
    most_pairs,
    rule_from_dict,
    rule_to_dict,
    scores_not_finite,
    summed_over_ranks,
)
from .dispatch import DISPATCHES, DispatchName
from .experts import ActivationName, Experts, FeedForward, Linear
from .follow import Follower, follow
from .layer import GateNorm, MoE, check_options
from .router import Router

__all__ = [
    "DISPATCHES",
    "RULES",
    "ActivationName",
    "DispatchName",
    "ExpertThreshold",
    "Experts",
    "FeedForward",
    "Follower",
    "GateNorm",
    "Linear",
    "MoE",
    "Observation",
    "Router",
    "Routing",
    "Rule",
    "all_finite",
    "check_options",
    "chooses_on_rank",
    "follow",
    "most_pairs",
    "rule_from_dict",
    "rule_to_dict",
    "scores_not_finite",
    "summed_over_ranks",
]

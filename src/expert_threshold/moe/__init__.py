"""The Mixture-of-Experts layer and its backends, with the parts of the routing rules that its users need."""

from ..kernels.activation import ActivationName
from ..routing import (
    ExpertChoice,
    ExpertThreshold,
    Observation,
    Routing,
    Rule,
    all_finite,
    rule_from_dict,
    rule_to_dict,
    scores_not_finite,
    summed_over_ranks,
)
from .backends import BACKENDS, DispatchName
from .experts import Experts, FeedForward, Linear, plain
from .follow import Follower, follow, hooked
from .layer import GateNorm, MoE, require_rule
from .router import Past, Router

__all__ = [
    "BACKENDS",
    "ActivationName",
    "DispatchName",
    "ExpertChoice",
    "ExpertThreshold",
    "Experts",
    "FeedForward",
    "Follower",
    "GateNorm",
    "Linear",
    "MoE",
    "Observation",
    "Past",
    "Router",
    "Routing",
    "Rule",
    "all_finite",
    "follow",
    "hooked",
    "plain",
    "require_rule",
    "rule_from_dict",
    "rule_to_dict",
    "scores_not_finite",
    "summed_over_ranks",
]

"""The Mixture-of-Experts layer and its backends, and the names from `routing` that users of the layer need.

Dimension names used in docstrings:

    batch, time    sequences, and tokens in a sequence: x is (batch, time, d_model); backends see tokens = batch · time
    d_model        width of a token
    d_expert       hidden width of an expert; swiglu has twice that before its nonlinearity
    experts        routed experts; weights are (experts, out, in)
    pairs          pairs of a token and one of its experts, ordered by expert, then token; the sum of all fanouts
    rows, slots    positions in a buffer for pairs; positions without a pair are padding
"""

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
from .experts import Experts, FeedForward, Linear, hooked, plain
from .follow import Follower, FollowerHook, follow
from .layer import GateNorm, MoE, require_rule
from .replay import Capture, decide, replay, routing_version
from .router import Router, RoutingHistory

__all__ = [
    "BACKENDS",
    "ActivationName",
    "Capture",
    "DispatchName",
    "ExpertChoice",
    "ExpertThreshold",
    "Experts",
    "FeedForward",
    "Follower",
    "FollowerHook",
    "GateNorm",
    "Linear",
    "MoE",
    "Observation",
    "Router",
    "Routing",
    "RoutingHistory",
    "Rule",
    "all_finite",
    "decide",
    "follow",
    "hooked",
    "plain",
    "replay",
    "require_rule",
    "routing_version",
    "rule_from_dict",
    "rule_to_dict",
    "scores_not_finite",
    "summed_over_ranks",
]

"""The Mixture-of-Experts layer and its backends.

Dimension names used in docstrings:

    batch, time    sequences, and tokens in a sequence: x is (batch, time, d_model); backends see tokens = batch · time
    d_model        width of a token
    d_expert       hidden width of an expert; swiglu has twice that before its nonlinearity
    experts        routed experts; weights are (experts, out, in)
    pairs          pairs of a token and one of its experts, ordered by expert, then token; the sum of all fanouts
    rows, slots    positions in a buffer for pairs; positions without a pair are padding
"""

from ..kernels.activation import ActivationName
from .backends import BACKENDS, DispatchName
from .experts import Experts, FeedForward, Linear, hooked, plain
from .follow import Follower, FollowerHook, follow
from .layer import GateNorm, MoE, require_rule
from .replay import Capture, decide, replay, routing_version
from .router import Router, RoutingHistory

__all__ = [
    "BACKENDS", "ActivationName", "Capture", "DispatchName", "Experts", "FeedForward", "Follower", "FollowerHook",
    "GateNorm", "Linear", "MoE", "Router", "RoutingHistory", "decide", "follow", "hooked", "plain", "replay",
    "require_rule", "routing_version",
]  # fmt: skip

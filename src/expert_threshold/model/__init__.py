"""The language model."""

from ..moe import Observation, Routing, Rule
from .attention import Cache
from .gpt import GPT, GPTConfig, Output
from .presets import PRESETS, TRUNKS, flops_per_token, parameter_counts
from .score import Continuation, common_prefix, crop, score

__all__ = [
    "GPT",
    "PRESETS",
    "TRUNKS",
    "Cache",
    "Continuation",
    "GPTConfig",
    "Observation",
    "Output",
    "Routing",
    "Rule",
    "common_prefix",
    "crop",
    "flops_per_token",
    "parameter_counts",
    "score",
]

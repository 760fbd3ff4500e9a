"""The language model."""

from ..moe import Observation, Routing, Rule, chooses_on_rank
from .attention import Cache
from .gpt import GPT, GPTConfig, Output
from .presets import PRESETS, flops_per_token, parameter_counts
from .score import Continuation, Score, common_prefix, crop, score

__all__ = [
    "GPT",
    "PRESETS",
    "Cache",
    "Continuation",
    "GPTConfig",
    "Observation",
    "Output",
    "Routing",
    "Rule",
    "Score",
    "chooses_on_rank",
    "common_prefix",
    "crop",
    "flops_per_token",
    "parameter_counts",
    "score",
]

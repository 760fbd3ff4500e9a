"""The language model."""

from ..moe import Observation, Routing
from .attention import Cache
from .gpt import GPT, GPTConfig, Output
from .presets import PRESETS, flops_per_token, parameter_counts

__all__ = [
    "GPT",
    "PRESETS",
    "Cache",
    "GPTConfig",
    "Observation",
    "Output",
    "Routing",
    "flops_per_token",
    "parameter_counts",
]

"""The language model.

Dimensions, by the words that docstrings use:

    batch, time       sequences and their tokens; time is at most the context
    d_model           width of the residual stream, heads · head_dim
    heads, kv_heads   of queries, and of keys and values, each of which serves heads / kv_heads of them
    vocab             tokens that there are: logits are (batch, time, vocab)
    layers            blocks; MoE layers are those after the dense ones
    rows              sequences in a cache, of capacity tokens each
"""

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

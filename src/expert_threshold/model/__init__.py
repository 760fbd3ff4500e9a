"""The language model.

Dimension names used in docstrings:

    batch, time       sequences, and tokens in a sequence; time is at most the context
    d_model           width of the residual stream, heads · head_dim
    heads, kv_heads   query heads, and key-value heads, each of which serves heads / kv_heads query heads
    vocab             tokens in the vocabulary: logits are (batch, time, vocab)
    layers            blocks; MoE layers follow the dense layers
    rows              sequences in a cache, each with room for `capacity` tokens
"""

from .attention import Cache
from .gpt import GPT, GPTConfig, Output
from .presets import PRESETS, TRUNKS, flops_per_token, parameter_counts
from .score import Continuation, common_prefix, crop, score

__all__ = [
    "GPT", "PRESETS", "TRUNKS", "Cache", "Continuation", "GPTConfig", "Output", "common_prefix", "crop",
    "flops_per_token", "parameter_counts", "score",
]  # fmt: skip

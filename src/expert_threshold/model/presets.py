"""Named model sizes, and functions that count parameters and FLOPs without allocating weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .gpt import GPTConfig


# Number of input channels that the gates of value embeddings and smear read, or all if there are fewer.
VALUE_GATE_CHANNELS, SMEAR_GATE_CHANNELS = 12, 24


def _size(layers: int, d_model: int, head_dim: int, vocab_size: int, context: int) -> dict[str, Any]:
    heads = d_model // head_dim
    return {
        "layers": layers, "d_model": d_model, "heads": heads, "kv_heads": heads, "d_expert": 2 * d_model,
        "d_feed_forward": 4 * d_model, "vocab_size": vocab_size, "context": context,
    }  # fmt: skip


# d<N> is the paper's convention: N layers, d_model = 64 N, heads of 128 (Appendix B).
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _size(2, 64, 32, vocab_size=512, context=128),
    "quickstart": _size(4, 128, 64, vocab_size=4096, context=512),
    "d4": _size(4, 256, 128, vocab_size=8192, context=512),
    "d6": _size(6, 384, 128, vocab_size=16384, context=1024),
    "d8": _size(8, 512, 128, vocab_size=32768, context=1024),
    "d12": _size(12, 768, 128, vocab_size=65536, context=2048),
    "d20": _size(20, 1280, 128, vocab_size=65536, context=2048),
}


# The model around the experts. Any preset can use any trunk; each option also has its own flag.
TRUNKS: dict[str, dict[str, Any]] = {
    "paper": {
        "value_embeddings": None, "residual_scalars": False, "skip_scalars": False, "smear": False, "backout": False,
        "qk_scale": 1.0, "rotary_base": 10_000.0, "key_offset": None, "windows": None, "short_window": None,
    },
    "nanochat": {  # at 92d63d4 (July 2026)
        "value_embeddings": "alternate", "residual_scalars": True, "skip_scalars": True, "smear": True, "backout": True,
        "qk_scale": 1.2, "rotary_base": 100_000.0, "windows": "SSSL",
    },
}  # fmt: skip
# No windows: in float32, torch implements them as masks and skips no computation.
TRUNKS["tuned"] = TRUNKS["nanochat"] | {"windows": None, "key_offset": "last"}


def parameter_counts(config: GPTConfig, *, rate: float | None = None) -> dict[str, int]:
    """Return the number of parameters in each part, in `total` and `active`, the mean number that a token uses.

    All counts include the embedding and the head. Value embeddings are look-ups, so only the token's own vector in each
    table is active. rate: routed experts per token in each layer; None uses the rule's rate.
    """
    matrices = 3 if config.activation == "swiglu" else 2
    head_dim = config.d_model // config.heads
    moe_layers = config.layers - config.dense_layers if config.rule is not None else 0
    num_experts, num_scores = (0, 0) if config.rule is None else (config.rule.num_experts, config.rule.num_scores)
    expert = matrices * config.d_model * config.d_expert
    tables, value_width = sum(map(config.has_value_embedding, range(config.layers))), config.kv_heads * head_dim
    parts = {
        "embedding": config.vocab_size * config.d_model,
        "head": config.vocab_size * config.d_model,
        "attention": config.layers * 2 * config.d_model * (config.heads + config.kv_heads) * head_dim,
        "dense": (config.layers - moe_layers) * matrices * config.d_model * config.d_feed_forward,
        "shared_experts": moe_layers * config.shared_experts * expert,
        "routed_experts": moe_layers * num_experts * expert,
        "routers": moe_layers * num_scores * config.d_model,
        "value_embeddings": tables * config.vocab_size * value_width,
        "gates": tables * min(VALUE_GATE_CHANNELS, config.d_model) * config.kv_heads
        + config.smear * min(SMEAR_GATE_CHANNELS, config.d_model),
        "scalars": (config.residual_scalars + config.skip_scalars) * config.layers + config.smear + config.backout,
    }
    total = sum(parts.values())
    trained = config.rule.experts_per_token if config.rule is not None else 0
    per_token = trained if rate is None else rate
    idle = round(moe_layers * (num_experts - per_token) * expert) + tables * (config.vocab_size - 1) * value_width
    return parts | {"total": total, "active": total - idle}


def flops_per_token(config: GPTConfig, *, rate: float | None = None) -> int:
    """Return the model FLOPs per token of forward and backward: 6 per active weight in a product, plus attention.

    Embeddings are look-ups and cost nothing. Attention is causal: without a window, a token attends to (context + 1) /
    2 keys on average, with 2 products in forward and 4 in backward. Forward is a third of the total. rate is as in
    `parameter_counts`.
    """
    counts = parameter_counts(config, rate=rate)
    head_dim = config.d_model // config.heads
    keys = sum(_keys(config.context, config.window(layer)) for layer in range(config.layers))
    attention = 12 * config.heads * head_dim * keys
    tables = sum(map(config.has_value_embedding, range(config.layers)))
    looked_up = counts["embedding"] + tables * config.kv_heads * head_dim
    return round(6 * (counts["active"] - looked_up - counts["scalars"]) + attention)


def _keys(length: int, window: int | None) -> float:
    """Return the mean number of keys that a token in a sequence of `length` tokens attends to, including its own."""
    most = length if window is None else min(window + 1, length)
    return most - most * (most - 1) / 2 / length

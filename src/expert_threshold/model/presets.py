"""Model sizes by name, and their parameters and FLOPs, counted without allocating weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .gpt import GPTConfig


def _size(layers: int, d_model: int, head_dim: int, vocab_size: int, context: int) -> dict[str, Any]:
    heads = d_model // head_dim
    return {
        "layers": layers,
        "d_model": d_model,
        "heads": heads,
        "kv_heads": heads,
        "d_expert": 2 * d_model,
        "d_feed_forward": 4 * d_model,
        "vocab_size": vocab_size,
        "context": context,
    }


# d<N> is the paper's convention: N layers, d_model = 64 N, heads of 128 (Appendix B).
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _size(2, 64, 32, vocab_size=512, context=128),
    "quickstart": _size(4, 128, 64, vocab_size=4096, context=256),
    "d4": _size(4, 256, 128, vocab_size=8192, context=512),
    "d6": _size(6, 384, 128, vocab_size=16384, context=1024),
    "d8": _size(8, 512, 128, vocab_size=32768, context=1024),
    "d12": _size(12, 768, 128, vocab_size=65536, context=2048),
    "d20": _size(20, 1280, 128, vocab_size=65536, context=2048),
}


def parameter_counts(config: GPTConfig, *, rate: float | None = None) -> dict[str, int]:
    """Return parameters by part, their `total`, and `active`, the mean used per token, embedding and head included.

    rate: routed experts per token in each layer; None is the rule's.
    """
    matrices = 3 if config.activation == "swiglu" else 2
    head_dim = config.d_model // config.heads
    moe_layers = config.layers - config.dense_layers if config.rule is not None else 0
    num_experts, num_scores = (0, 0) if config.rule is None else (config.rule.num_experts, config.rule.num_scores)
    expert = matrices * config.d_model * config.d_expert
    parts = {
        "embedding": config.vocab_size * config.d_model,
        "head": config.vocab_size * config.d_model,
        "attention": config.layers * 2 * config.d_model * (config.heads + config.kv_heads) * head_dim,
        "dense": (config.layers - moe_layers) * matrices * config.d_model * config.d_feed_forward,
        "shared_experts": moe_layers * config.shared_experts * expert,
        "routed_experts": moe_layers * num_experts * expert,
        "routers": moe_layers * num_scores * config.d_model,
    }
    total = sum(parts.values())
    trained = config.rule.experts_per_token if config.rule is not None else 0
    per_token = trained if rate is None else rate
    idle = round(moe_layers * (num_experts - per_token) * expert)
    return parts | {"total": total, "active": total - idle}


def flops_per_token(config: GPTConfig, *, context: int | None = None, rate: float | None = None) -> int:
    """Return model FLOPs of forward and backward per token: 6 per active weight in a product, plus attention's.

    The embedding is a look-up and costs nothing. Attention is causal: a token meets (context + 1) / 2 keys on average,
    with 2 products forward and 4 backward. A third of the total is the forward's. context defaults to the model's; rate
    as in `parameter_counts`.
    """
    length = config.context if context is None else context
    counts = parameter_counts(config, rate=rate)
    head_dim = config.d_model // config.heads
    attention = 12 * config.layers * config.heads * head_dim * (length + 1) / 2
    return round(6 * (counts["active"] - counts["embedding"]) + attention)

"""Operators of `decode.cpp`, which run a whole model for a few tokens and sample from its output."""

from __future__ import annotations

import ctypes
import functools

from torch import Tensor

from .. import operator
from .build import DECODER, DECODER_FLAGS, LIBRARIES, OPERATORS, load


@functools.cache
def decoder() -> ctypes.CDLL | None:
    """Return the kernels of the decoder, or None if they cannot be built. Any CPU can run this separate library."""
    found = load(DECODER, [OPERATORS], DECODER_FLAGS, LIBRARIES)
    return None if isinstance(found, str) else found


@operator()
def decoder_create(
    embed: Tensor, head: Tensor, cos: Tensor, sin: Tensor,
    qk_scale: float, offset_from: int,
    cache: Tensor, last: Tensor,
    smear_gate: Tensor | None, smear: float, backout: float,
    eps: float, softcap: float,
) -> int:  # fmt: skip
    """Create a decoder without layers, which the caller must destroy.

    embed: (vocab, d_model), cos, sin: (capacity, head_dim / 2), float32; cache: (layers, rows, capacity + 1, 2,
    kv_heads, head_dim) and, for smear_gate (1, channels), last: (rows, d_model), in the dtype of head and all other
    weights, float32 or bfloat16.
    """
    raise NotImplementedError


@operator()
def decoder_destroy(decoder: int) -> None:
    """Free a decoder."""


@operator()
def decoder_add_layer(
    decoder: int, qkv: Tensor, output: Tensor,
    values: Tensor | None, values_gate: Tensor | None, window: int, residual: float, skip: float,
    dense: list[Tensor], experts: list[Tensor],
    router: Tensor | None, cutoffs: Tensor | None, bias: Tensor | None, chosen: int,
    softmax_gates: bool, divide_by_fanout: bool,
) -> None:  # fmt: skip
    """Append a layer to a decoder. The input of the layer is residual · x + skip · the input of the first layer.

    values: value embeddings (vocab, kv_heads · head_dim), float32, with values_gate (kv_heads, channels). window: the
    number of earlier tokens that a token attends to. dense, experts: up, down and, for swiglu, gate, or empty. router:
    (num_scores, d_model), float32. cutoffs: (rows, experts), float32, may change later; without them, a token chooses
    the `chosen` highest of score + bias (experts,). softmax_gates: gates are the softmax of all scores, not σ.
    """


@operator()
def decoder_append(
    decoder: int, tokens: list[int], rows: list[int], places: list[int], first: int, threads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Append each token at its position in a row of the cache, and compute logits for tokens[first:].

    Returns logits (tokens - first, vocab); each row's argmax, maximum and log Σ exp, float64 (tokens - first, 3); the
    scores (MoE layers, tokens, num_scores) and assignment (MoE layers, tokens, experts) of all tokens; and the number
    of assigned pairs.
    """
    raise NotImplementedError


@operator()
def decoder_sample(logits: Tensor, temperature: float, most: int, top_p: float, number: float) -> int:
    """Draw a token from logits (vocab,) float32 like `Sampler`. Returns -1 if a logit is NaN."""
    raise NotImplementedError

"""Estimates the memory of a training step: what each layer keeps for backward, and what its backward adds.

Small tensors are ignored, such as a number per token or head, or a rule's results other than scores and gates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..kernels.cpu.blocks import GROUP, NUMBERS_PER_CHUNK, override
from ..moe.backends.static import in_one_kernel
from ..moe.experts import HIDDEN_PER_BLOCK
from .cross_entropy import LOGITS_PER_CHUNK
from .gpt import GPTConfig

FLOAT32, INT64 = 4, 8  # bytes


class Memory(NamedTuple):
    """The bytes in use at one moment.

    dispatch: tensors kept by routers and routed experts; logits: the loss of the head; casts: weights in the compute
    dtype; gradients: gradients of weights; activations: everything else.
    """

    activations: int = 0
    dispatch: int = 0
    logits: int = 0
    casts: int = 0
    gradients: int = 0

    @property
    def total(self) -> int:
        return sum(self)


class Step(NamedTuple):
    """The last micro-batch of a step on one device.

    rows: rows in the buffers of each layer for token-expert pairs. dispatch: the backend, or None without experts.
    accumulates: True if there are gradients from earlier micro-batches.
    """

    tokens: int
    rows: int
    dtype: torch.dtype
    gpu: bool
    dispatch: str | None
    checkpointing: bool = False
    accumulates: bool = False


class _Layer(NamedTuple):
    kept: Memory  # from forward to backward, besides the block's input
    backward: Memory  # what backward adds at its peak
    gradients: int


def backend(config: GPTConfig, tokens: int, dtype: torch.dtype, *, gpu: bool) -> str | None:
    """Return the backend that `auto` would choose on a Hopper GPU or this CPU, or None for a model without experts."""
    if config.rule is None or config.dense_layers == config.layers:
        return None
    if config.dispatch != "auto":
        return config.dispatch
    if gpu:
        return "static" if in_one_kernel(dtype, config.d_model, config.d_expert) else "grouped"
    x = torch.empty(1, dtype=dtype).expand(tokens, config.d_model)  # stores one number
    return "grouped" if override("routed_sum", x, config.d_expert, config.activation) is None else "cpu"


def moments(config: GPTConfig, step: Step) -> list[Memory]:
    """Return the memory during the loss, and then during the backward of each block, from the last to the first."""
    row = config.d_model * step.tokens * step.dtype.itemsize
    layers = [_layer(config, step, layer) for layer in range(config.layers)]
    head = config.vocab_size * config.d_model * FLOAT32
    gradients = 2 * head + sum(layer.gradients for layer in layers) if step.accumulates else 0
    inputs = (1 + config.residual_scalars) * row
    # Outside blocks: the embedding and the input of the head; with smear, also the previous embedding and the sum.
    now = Memory(activations=inputs * config.layers + (2 + 2 * config.smear) * row)
    if not step.checkpointing:
        now = _add(now, *(layer.kept for layer in layers))
    found = [_add(now, Memory(activations=row, logits=_logits(config, step), gradients=gradients))]
    gradients += head
    for layer in reversed(layers):
        if step.checkpointing:  # the block's forward runs a second time
            now = _add(now, layer.kept)
        found.append(_add(now, layer.backward, Memory(gradients=gradients)))
        now = Memory(*(all_ - own for all_, own in zip(now, layer.kept, strict=True)))
        now = now._replace(activations=now.activations - inputs)
        gradients += 0 if step.accumulates else layer.gradients
    return found


def _add(*parts: Memory) -> Memory:
    return Memory(*map(sum, zip(*parts, strict=True)))


def _layer(config: GPTConfig, step: Step, layer: int) -> _Layer:
    size, (width, d_expert) = step.dtype.itemsize, (config.d_model, config.d_expert)
    values, ups = config.kv_heads * width // config.heads, 2 if config.activation == "swiglu" else 1
    rule = None if layer < config.dense_layers else config.rule
    hidden = config.d_feed_forward if rule is None else config.shared_experts * d_expert
    table = config.has_value_embedding(layer)
    x = torch.empty(1, dtype=step.dtype).expand(step.tokens, width)
    heads = x.unflatten(-1, (config.heads, -1))
    attends_by_kernel = not step.gpu and override("attention", heads) is not None
    at_once = step.gpu or override("feed_forward", x, hidden, config.activation) is not None  # not in blocks of rows

    # Numbers per token: both norms' outputs, queries, keys, values, attention's output, its sum with the block's input,
    # the value embeddings looked up, and pre-activations.
    kept, masks = 5 * width + (2 + table) * values + ups * hidden, 0
    window = config.window(layer)
    if not attends_by_kernel:  # rotated queries and keys; on a GPU, the output in another layout
        kept += width + (1 + config.has_key_offset(layer)) * values + step.gpu * width
        masks = 0 if window is None else config.context**2 * size
    backward = max(8 * width, 3 * width + 2 * hidden * at_once) * step.tokens * size
    weights = 2 * width * (width + values) + (1 + ups) * width * hidden
    dispatch = router = 0
    if rule is not None:
        router = rule.num_scores * width
        weights += rule.num_experts * (1 + ups) * width * d_expert
        row = ups * d_expert + (2 * width + d_expert if step.dispatch == "reference" else 0)
        dispatch = step.rows * (row * size + 4 * INT64) + step.tokens * rule.num_scores * 2 * FLOAT32
        by_blocks = step.dispatch == "grouped" and not step.gpu
        of_row = 4 * width if by_blocks else 3 * width + (1 + ups) * d_expert
        peak = (step.rows * of_row + 3 * step.tokens * width) * size
        if by_blocks:  # a block's activations, widened for sums; the backward of shared experts is over
            widened = 0 if size == FLOAT32 else FLOAT32
            peak += min(step.rows * d_expert, HIDDEN_PER_BLOCK) * (2 * size + widened)
            peak -= ups * hidden * step.tokens * size
        backward = max(backward, peak)
    casts = weights if size < FLOAT32 else (width + 2 * values) * width
    return _Layer(
        Memory(kept * step.tokens * size + masks, dispatch, casts=casts * size),
        Memory(activations=backward + 2 * weights),  # plus gradients that await a cast or scale
        (weights + router + table * config.vocab_size * values) * FLOAT32,
    )


def _logits(config: GPTConfig, step: Step) -> int:
    """Return the bytes of the loss of the head: its buffers, and the gradients of its input and weight."""
    size, vocab, width = step.dtype.itemsize, config.vocab_size, config.d_model
    x, weight = torch.empty(1, dtype=step.dtype).expand(step.tokens, width), torch.empty(1).expand(vocab, width)
    if not step.gpu and override("cross_entropy", x, weight, config.softcap) is not None:
        rows = min(max(NUMBERS_PER_CHUNK // vocab, GROUP), step.tokens)
        buffers = 3 * vocab * width * size + rows * (vocab + width) * size
    else:
        rows = min(max(LOGITS_PER_CHUNK["kernel" if step.gpu else "cpu"] // vocab, 1), step.tokens)
        buffers = rows * vocab * size + vocab * width * size
        if not step.gpu:
            widened = 0 if size == FLOAT32 else FLOAT32  # a chunk's gradient
            buffers += rows * vocab * 3 * FLOAT32 + vocab * width * (size + widened)
    return buffers + vocab * width * FLOAT32 + step.tokens * width * size

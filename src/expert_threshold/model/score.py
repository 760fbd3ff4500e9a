"""Computes the loss of continuations under a model, in batches. Shared prefixes are computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .attention import Cache
from .gpt import GPT

TOKENS_AT_ONCE = 8192
LOGITS_AT_ONCE = 1 << 25  # float32 numbers, 128 MiB
CACHE_AT_ONCE = 1 << 30  # bytes
SHARED_PREFIX = 64  # tokens; a shorter shared prefix is not worth a separate forward

_IGNORED = -1  # marks the absence of a target for GPT


class Continuation(NamedTuple):
    """A sequence whose tokens from index `start` on are scored, given the preceding tokens. `start` is at least 1."""

    tokens: list[int]
    start: int


class Score(NamedTuple):
    """nats: the total loss of `tokens` tokens. misses: how many of them were not the likeliest token, if counted."""

    nats: float
    tokens: int
    misses: int


def crop(continuation: Continuation, length: int) -> Continuation:
    """Return the last `length` tokens. `start` stays at least 1, since a sequence's first token is never scored."""
    lost = max(len(continuation.tokens) - length, 0)
    return Continuation(continuation.tokens[lost:], max(continuation.start - lost, 1))


def common_prefix(sequences: Sequence[list[int]]) -> int:
    """Return the length of the longest common prefix."""
    first, last = min(sequences), max(sequences)  # all sequences that sort between these two share their prefix
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))


@torch.inference_mode()
def score(
    model: GPT,
    groups: Sequence[Sequence[Continuation]],
    *,
    misses: bool = False,
    tokens_at_once: int = TOKENS_AT_ONCE,
    shared_prefix: int = SHARED_PREFIX,
) -> list[list[Score]]:
    """Return the scores of the continuations in each group. Like the choices of a question, they may share a prefix.

    misses: also count misses, for which logits are materialised. Routing is causal, and the mode of the model does not
    change. tokens_at_once bounds batches of several groups. Raises ValueError if a continuation exceeds the context.
    """
    scores = [[Score(0.0, 0, 0)] * len(group) for group in groups]
    was_training = model.training
    model.eval()
    try:
        bundles = _bundles(groups, misses, shared_prefix)
        for batch in _batches(model, bundles, tokens_at_once, misses):
            rows = [row for bundle in batch for row in bundle.rows]
            for (group, place, _), found in zip(rows, _score(model, batch, misses), strict=True):
                scores[group][place] = found
    finally:
        model.train(was_training)
    return scores


class _Bundle(NamedTuple):
    """Rows whose first `shared` tokens are computed only once. Each row has its group and its index in the group."""

    shared: int
    rows: list[tuple[int, int, Continuation]]

    @property
    def longest(self) -> int:
        return max(len(continuation.tokens) for *_, continuation in self.rows)


def _bundles(groups: Sequence[Sequence[Continuation]], misses: bool, shared_prefix: int) -> Iterator[_Bundle]:
    for i, group in enumerate(groups):
        rows = [(i, j, c) for j, c in enumerate(group) if len(c.tokens) > c.start]
        if len(rows) > 1:
            alike = common_prefix([c.tokens for *_, c in rows])
            shared = min(alike, *(c.start - 1 for *_, c in rows))  # the last given token predicts the first scored one
            if shared >= shared_prefix:
                yield _Bundle(shared, rows)
                continue
        for row in rows:  # alone; if logits are needed, a separate forward of the given tokens avoids their logits
            given = row[2].start - 1
            yield _Bundle(given if misses and given >= shared_prefix else 0, [row])


def _batches(model: GPT, bundles: Iterator[_Bundle], tokens_at_once: int, misses: bool) -> Iterator[list[_Bundle]]:
    """Yield batches of similar lengths, to keep padding low, and the longest first, to run out of memory early."""
    batch: list[_Bundle] = []
    for bundle in sorted(bundles, key=lambda bundle: (-bundle.shared, -bundle.longest)):
        split = batch and bool(bundle.shared) != bool(batch[0].shared)
        if split or (batch and not _fits(model, [*batch, bundle], tokens_at_once, misses)):
            yield batch
            batch = []
        batch.append(bundle)
    if batch:
        yield batch


def _fits(model: GPT, batch: Sequence[_Bundle], tokens_at_once: int, misses: bool) -> bool:
    config = model.config
    shared, longest = min(bundle.shared for bundle in batch), max(bundle.longest for bundle in batch)
    rows = sum(len(bundle.rows) for bundle in batch)
    ends = rows * (longest - shared)
    cached = 2 * config.layers * config.kv_heads * (config.d_model // config.heads) * model.compute_dtype.itemsize
    return (
        len(batch) * shared + ends <= tokens_at_once
        and not (misses and ends * config.vocab_size > LOGITS_AT_ONCE)
        and not (shared and rows * longest * cached > CACHE_AT_ONCE)
    )


def _score(model: GPT, batch: Sequence[_Bundle], misses: bool) -> list[Score]:
    shared = min(bundle.shared for bundle in batch)
    rows = [continuation for bundle in batch for *_, continuation in bundle.rows]
    inputs = _stack(model, [row.tokens[shared:-1] for row in rows], 0)
    targets = _stack(model, [[_IGNORED] * (row.start - 1 - shared) + row.tokens[row.start :] for row in rows], _IGNORED)
    cache = _compute_once(model, batch, shared, inputs.shape[1]) if shared else None
    scored = targets != _IGNORED
    missed = torch.zeros_like(targets)
    if misses:
        logits = model(inputs, cache=cache).logits[scored]
        losses = torch.zeros(targets.shape, device=targets.device)
        losses[scored] = F.cross_entropy(logits, targets[scored], reduction="none")
        missed[scored] = (logits.argmax(1) != targets[scored]).long()
    else:
        losses = model(inputs, targets, cache=cache).token_losses
    sums = (each.sum(1).tolist() for each in (losses, scored, missed))
    return [Score(*row) for row in zip(*sums, strict=True)]


def _compute_once(model: GPT, batch: Sequence[_Bundle], shared: int, room: int) -> Cache:
    """Return a cache that contains the first `shared` tokens of every row and has room for `room` more tokens."""
    prefix = _stack(model, [bundle.rows[0][2].tokens[:shared] for bundle in batch], 0)
    once = model.new_cache(len(batch), shared)
    model(prefix, torch.full_like(prefix, _IGNORED), cache=once)  # without targets no logits are computed
    return once.copies([i for i, bundle in enumerate(batch) for _ in bundle.rows], shared + room)


def _stack(model: GPT, rows: Sequence[list[int]], padding: int) -> Tensor:
    """Stack rows and pad them on the right, where causality hides the padding from the tokens."""
    padded = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=padding)
    return padded.to(model.embed.weight.device)

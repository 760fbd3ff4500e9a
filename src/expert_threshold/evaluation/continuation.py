"""How well a model continues a prompt: the tokens that count, and their losses in batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from ..data import IGNORED, Tokenizer
from ..model import GPT
from .bundle import Kind
from .core import Answer, Question

TOKENS_AT_ONCE = 8192
LOGITS_AT_ONCE = 1 << 25  # float32 numbers, 128 MiB
SHARED_PREFIX = 64  # tokens from which on a prefix is worth a forward of its own


class Continuation(NamedTuple):
    """The tokens from `start` on are scored; those before are given."""

    tokens: list[int]
    start: int

    @property
    def inputs(self) -> list[int]:
        return self.tokens[:-1]

    @property
    def targets(self) -> list[int]:
        return [IGNORED] * (self.start - 1) + self.tokens[self.start :]


def continuations(kind: Kind, sequences: Sequence[list[int]]) -> list[Continuation]:
    """Which tokens of a question's sequences are scored.

    multiple choice: those behind the tokens that all begin with. schema: those that all end with. language modelling,
    of the sequences without and with the answer: those of the latter behind the tokens that both begin with.
    """
    if kind == "schema":
        shared = _shared(map(reversed, sequences))
        return [Continuation(tokens, len(tokens) - shared) for tokens in sequences]
    shared = _shared(sequences)
    return [Continuation(tokens, shared) for tokens in (sequences[1:] if kind == "language_modeling" else sequences)]


def _shared(sequences: Iterable[Iterable[int]]) -> int:
    """How many first tokens are equal in all."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*sequences, strict=False)))


def crop(continuation: Continuation, context: int) -> Continuation:
    """The last `context` tokens. The first of a sequence cannot be scored, so that `start` stays at least 1."""
    lost = max(len(continuation.tokens) - context, 0)
    return Continuation(continuation.tokens[lost:], max(continuation.start - lost, 1))


@dataclass(frozen=True)
class ModelScorer:
    """Answers by a model: by the mean loss of each continuation, in nats per token, or for language modelling by the
    number of tokens that greedy decoding gets wrong. Routing is causal; the model keeps its mode.
    """

    model: GPT
    tokenizer: Tokenizer
    tokens_at_once: int = TOKENS_AT_ONCE
    shared_prefix: int = SHARED_PREFIX

    def __call__(self, questions: Sequence[Question]) -> list[Answer]:
        texts = [prompt for question in questions for prompt in question.prompts]
        encoded = iter(self.tokenizer.encode_batch(texts))
        context = self.model.config.context
        whole = [continuations(q.kind, [[self.tokenizer.bos, *next(encoded)] for _ in q.prompts]) for q in questions]
        fitting = [[crop(continuation, context) for continuation in group] for group in whole]
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode():
                penalties = self._penalties(questions[0].kind, fitting)
        finally:
            self.model.train(was_training)
        return [
            Answer(
                row,
                cropped=sum(len(c.tokens) > context for c in group),
                cut=sum(len(c.tokens) - max(c.start, 1) > context - 1 for c in group),
            )
            for row, group in zip(penalties, whole, strict=True)
        ]

    def _penalties(self, kind: Kind, groups: list[list[Continuation]]) -> list[list[float]]:
        """One per continuation; not a number where none of its tokens is scored."""
        penalties = [[math.nan] * len(group) for group in groups]
        single = []
        for i, group in enumerate(groups):
            if kind == "multiple_choice" and self._shares_prefix(group):
                penalties[i] = self._losses_behind_prefix(group)
            else:
                single += [(i, j, c) for j, c in enumerate(group) if len(c.tokens) > c.start]
        tokens_at_once = self.tokens_at_once
        if kind == "language_modeling":
            tokens_at_once = min(tokens_at_once, LOGITS_AT_ONCE // self.model.config.vocab_size)
        for batch in _by_length(single, tokens_at_once):
            rows = [continuation for *_, continuation in batch]
            score = self._misses if kind == "language_modeling" else self._losses
            for (i, j, _), penalty in zip(batch, score(rows), strict=True):
                penalties[i][j] = penalty
        return penalties

    def _losses(self, rows: Sequence[Continuation]) -> list[float]:
        targets = self._stack([row.targets for row in rows], IGNORED)
        losses = self.model(self._stack([row.inputs for row in rows], 0), targets).token_losses
        return _means(losses, targets)

    def _misses(self, rows: Sequence[Continuation]) -> list[float]:
        targets = self._stack([row.targets for row in rows], IGNORED)
        logits = self.model(self._stack([row.inputs for row in rows], 0)).logits
        misses: list[float] = ((logits.argmax(-1) != targets) & (targets != IGNORED)).sum(1).tolist()
        return misses

    def _shares_prefix(self, group: Sequence[Continuation]) -> bool:
        """Whether all begin with the same tokens, which cropping prevents, and with enough of them."""
        start = group[0].start
        same = all(c.start == start and c.tokens[:start] == group[0].tokens[:start] for c in group)
        return same and start > self.shared_prefix and len(group) > 1

    def _losses_behind_prefix(self, group: Sequence[Continuation]) -> list[float]:
        """As `_losses`, with the tokens that all begin with computed once."""
        shared = group[0].start - 1  # the prefix's last token goes with the continuations, whose first it predicts
        targets = self._stack([c.targets[shared:] for c in group], IGNORED)
        if not targets.numel():
            return [math.nan] * len(group)
        once = self.model.new_cache(1, shared)
        prefix = self._stack([group[0].tokens[:shared]], 0)
        self.model(prefix, torch.full_like(prefix, IGNORED), cache=once)  # with targets no logits are kept
        cache = self.model.new_cache(len(group), shared + targets.shape[1])
        cache.keys[:, :, :, :shared] = once.keys
        cache.values[:, :, :, :shared] = once.values
        cache.length = shared
        inputs = self._stack([c.inputs[shared:] for c in group], 0)
        return _means(self.model(inputs, targets, cache=cache).token_losses, targets)

    def _stack(self, rows: Sequence[Sequence[int]], padding: int) -> Tensor:
        """Padded on the right, where causality keeps padding from being seen."""
        length = max(map(len, rows))
        padded = [[*row, *[padding] * (length - len(row))] for row in rows]
        return torch.tensor(padded, device=self.model.embed.weight.device)


def _means(losses: Tensor, targets: Tensor) -> list[float]:
    """Of each row over its targets; 0 / 0 is not a number."""
    means: list[float] = (losses.sum(1) / (targets != IGNORED).sum(1)).tolist()
    return means


Placed = tuple[int, int, Continuation]


def _by_length(rows: list[Placed], tokens_at_once: int) -> Iterator[list[Placed]]:
    """Batches of similar lengths, the longest first, that padded hold tokens_at_once tokens at most, or one row."""
    batch: list[Placed] = []
    for row in sorted(rows, key=lambda row: -len(row[2].tokens)):
        if batch and (len(batch) + 1) * len(batch[0][2].tokens) > tokens_at_once:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch

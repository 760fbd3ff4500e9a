"""Scores a question's prompts with a model: which tokens count, and their loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..data import Tokenizer
from ..model import GPT, Continuation, common_prefix, crop, score
from ..model.score import SHARED_PREFIX, TOKENS_AT_ONCE
from .bundle import Kind
from .core import Answer, Question


def continuations(kind: Kind, sequences: Sequence[list[int]]) -> list[Continuation]:
    """Return the continuations of a question's sequences, whose tokens are scored.

    Multiple choice scores the tokens after the common prefix; schema, the common suffix; language modelling, whose two
    sequences are without and with the answer, the second's tokens after the common prefix.
    """
    if kind == "schema":
        shared = common_prefix([tokens[::-1] for tokens in sequences])
        return [Continuation(tokens, len(tokens) - shared) for tokens in sequences]
    shared = common_prefix(sequences)
    return [Continuation(tokens, shared) for tokens in (sequences[1:] if kind == "language_modeling" else sequences)]


@dataclass(frozen=True)
class ModelScorer:
    """Answers questions by the model's mean loss of each continuation, in nats per token, or for language modelling by
    the number of tokens that greedy decoding gets wrong. Routing is causal; the model keeps its mode.
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
        exact = questions[0].kind == "language_modeling"
        scores = score(
            self.model,
            [[crop(continuation, context) for continuation in group] for group in whole],
            misses=exact,
            tokens_at_once=self.tokens_at_once,
            shared_prefix=self.shared_prefix,
        )
        return [
            Answer(
                # NaN where no token is scored.
                [math.nan if not s.tokens else s.misses if exact else s.nats / s.tokens for s in found],
                cropped=sum(len(c.tokens) > context for c in group),
                cut=sum(len(c.tokens) - max(c.start, 1) > context - 1 for c in group),
            )
            for found, group in zip(scores, whole, strict=True)
        ]

"""Text from a model, token by token, with a key-value cache."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..data import Tokenizer
from ..model import GPT, Routing

PREFILL = 256
"""Tokens of the prompt per forward, which bounds the memory of masks and logits."""


class TokenRouting(NamedTuple):
    """Where one layer sent one token: its scores for all experts, the experts it went to, and their gates."""

    scores: tuple[float, ...]
    experts: tuple[int, ...]
    gates: tuple[float, ...]


class Step(NamedTuple):
    """One token. text: what it completes; a character cut in two comes with the token that holds its last byte.

    logprob: nats, of the model itself, before temperature and top-k. finish: None while more is to come, "stop" where
    the document ended, "length" where max_tokens or the context was used up. routing: one per MoE layer if recorded.
    """

    token: int
    text: str
    logprob: float
    finish: Literal["stop", "length"] | None
    routing: tuple[TokenRouting, ...] | None


def generate(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    *,
    max_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int | None = None,
    stop_at_document_end: bool = True,
    record: bool = False,
) -> Iterator[Step]:
    """Continue a prompt: a text, which opens a document, or token ids as they are.

    temperature 0 takes the likeliest token; top_k=None samples from all. The same seed gives the same tokens; None
    draws one. The document ends where the model opens the next one: that step has the token and no text. Prompt and
    continuation together fill the context at most. record=True adds each token's routing.

    The model is in evaluation mode while the iterator runs and gets its mode back afterwards.
    Raises ValueError if an option is out of range or the prompt is empty or leaves no room.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} must be at least 1")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be at least 0 and finite; 0 takes the likeliest token")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1; None samples from all tokens")
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed} must be a whole number from 0 to below 2**63; None draws one")
    ids = [tokenizer.bos, *tokenizer.encode(prompt)] if isinstance(prompt, str) else list(prompt)
    if not ids:
        raise ValueError("prompt has no tokens; give at least the one that opens a document")
    room = model.config.context - len(ids)
    if room < 1:
        raise ValueError(
            f"prompt of {len(ids)} tokens leaves no room in the context of {model.config.context}; shorten it"
        )
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    sampler = Sampler(temperature, top_k, generator)
    return _decode(model, tokenizer, ids, min(max_tokens, room), sampler, stop_at_document_end, record)


class Sampler(NamedTuple):
    """Draws on the CPU, so that a seed means the same on every device."""

    temperature: float
    top_k: int | None
    generator: torch.Generator

    def __call__(self, logits: Tensor) -> int:
        """A token id of logits (vocab,)."""
        if self.temperature == 0:
            return int(logits.argmax())
        count = len(logits) if self.top_k is None else min(self.top_k, len(logits))
        likeliest, tokens = logits.topk(count)
        # In float64, and with the largest at 0, the smallest temperature overflows nothing.
        weights = ((likeliest.double() - likeliest[0]) / self.temperature).exp()
        return int(tokens[weights.multinomial(1, generator=self.generator)])


@torch.inference_mode()
def _decode(
    model: GPT, tokenizer: Tokenizer, ids: list[int], count: int, sampler: Sampler, stop: bool, record: bool
) -> Iterator[Step]:
    text = codecs.getincrementaldecoder("utf-8")("replace")
    cache = model.new_cache(1, len(ids) + count)
    was_training = model.training
    model.eval()
    try:
        for start in range(0, len(ids), PREFILL):
            output = model(_row(model, ids[start : start + PREFILL]), cache=cache)
        for left in reversed(range(count)):
            logits = output.logits[0, -1].cpu()
            token = sampler(logits)
            ended = stop and token == tokenizer.bos
            finish: Literal["stop", "length"] | None = "stop" if ended else None if left else "length"
            if record or finish is None:
                output = model(_row(model, [token]), cache=cache, record=record)
            yield Step(
                token,
                text.decode(b"" if ended else tokenizer.decode_bytes([token]), final=finish is not None),
                float(logits[token] - logits.logsumexp(0)),
                finish,
                tuple(map(_of_last_token, output.routings)) if record else None,
            )
            if finish is not None:
                return
    finally:
        model.train(was_training)


def _row(model: GPT, ids: list[int]) -> Tensor:
    return torch.tensor([ids], device=model.embed.weight.device)


def _of_last_token(routing: Routing) -> TokenRouting:
    scores = routing.scores[0, -1]
    experts = routing.assignment[0, -1].nonzero()[:, 0]
    return TokenRouting(tuple(scores.tolist()), tuple(experts.tolist()), tuple(scores[experts].sigmoid().tolist()))

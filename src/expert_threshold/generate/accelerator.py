"""The result of a decoding step, and the interface of accelerators, which compute one faster than `GPT.forward`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..model import Output
from ..moe import Past


class Peak(NamedTuple):
    """The index of the highest logit, its value, and log Σ exp(logit)."""

    likeliest: int
    highest: float
    logsumexp: float


class Decoded(NamedTuple):
    """The results of appending tokens to sequences.

    logits: (tokens asked for, vocab), float32; peaks: one for each row of them. Routing has all tokens and MoE layers:
    scores (layers, tokens, num_scores), boolean assignment and gates (layers, tokens, experts), where gates of None are
    σ(scores). assigned: token-expert pairs in total.
    """

    logits: Tensor
    peaks: list[Peak]
    scores: Tensor
    assignment: Tensor
    gates: Tensor | None
    assigned: int

    @classmethod
    def of(cls, output: Output, num_experts: int) -> Decoded:
        """Build the record from a recorded forward without targets."""
        assert output.logits is not None
        assert output.routings is not None
        logits = output.logits.flatten(0, 1)
        highest, likeliest = logits.max(-1)
        peaks = list(map(Peak, likeliest.tolist(), highest.tolist(), logits.logsumexp(-1).tolist()))
        if not output.routings:
            nothing = logits.new_empty(0, len(logits), 0)
            return cls(logits, peaks, nothing, nothing.bool(), nothing, 0)
        scores, assignment, gates = (
            torch.stack([getattr(routing, name).flatten(0, 1) for routing in output.routings])
            for name in ("scores", "assignment", "gates")
        )
        assignment, gates = assignment[..., :num_experts], gates[..., :num_experts]  # null slots may follow them
        return cls(logits, peaks, scores, assignment, gates, int(assignment.sum()))

    @classmethod
    def join(cls, parts: Sequence[Decoded]) -> Decoded:
        """Return the results for the tokens of all parts, in order. Gates must be given."""
        if len(parts) == 1:
            return parts[0]
        logits, peaks, scores, assignment, gates, assigned = zip(*parts, strict=True)
        return cls(
            logits=torch.cat(logits),
            peaks=[peak for some in peaks for peak in some],
            scores=torch.cat(scores, 1),
            assignment=torch.cat(assignment, 1),
            gates=torch.cat(gates, 1),
            assigned=sum(assigned),
        )


class Accelerator(Protocol):
    """Appends a few tokens to sequences in a cache, as `GPT.forward` does; same bits whichever rows share a batch."""

    most: int
    """Up to this many tokens of one row, it is faster than matrix products."""

    def begin(self, row: int, pasts: Mapping[int, Past]) -> None:
        """Begin an empty sequence in a row; arguments as in `Cache.begin`."""

    def append(self, rows: Sequence[int], tokens: Sequence[int], places: Sequence[int], first: int = 0) -> Decoded:
        """Compute each token at its place in a row of the cache, those of one row in order; logits from `first` on.

        Raises IndexError if a token is not in the vocabulary.
        """

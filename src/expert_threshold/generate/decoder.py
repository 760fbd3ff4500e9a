"""Sequences that grow by a few tokens at a time, each in its own row of a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..model import GPT
from ..moe import RoutingHistory
from .kernel import Decoded, kernel_of

PREFILL = 256
"""Prompt tokens per forward; bounds the memory of masks and logits."""


class Decoder:
    """Appends tokens to sequences by `GPT.forward` with a cache, or by a kernel where there is one.

    Uses a snapshot of the model. rows: sequences at once; capacity: tokens per row. strict: a sequence gets the same
    bits alone and in company. A kernel always guarantees that. Without one, a strict step computes row by row;
    otherwise rounding depends on the number of rows and on how threads divide them.
    """

    def __init__(self, model: GPT, rows: int, capacity: int, *, strict: bool = False) -> None:
        self.model = model.snapshot()
        self.rows, self.capacity, self.strict = rows, capacity, strict
        self.cache = self.model.new_cache(rows, capacity)
        self.kernel = kernel_of(self.model, self.cache)
        self._pasts = self._pasts_at(None)  # the snapshot never changes

    def open(self, row: int, rate: float | None = None) -> None:
        """Begin an empty sequence in a row. rate: routed experts per token for this row; None is the model's rate."""
        pasts = self._pasts if rate is None else self._pasts_at(rate)
        self.cache.begin(row, pasts)
        if self.kernel is not None:
            self.kernel.begin(row, pasts)

    def _pasts_at(self, rate: float | None) -> dict[int, RoutingHistory]:
        return {layer: moe.router.past(rate) for layer, moe in self.model.moe_layers()}

    def close(self, row: int, *, wipe: bool = False) -> None:
        """End a row's sequence. wipe: forget its keys and values, too, which must be done if they may not be finite:
        attention gives those beyond a sequence's end a weight of 0, but 0 · NaN is NaN.
        """
        self.cache.begin(row, {})
        if wipe:
            self.cache.held[:, row] = 0

    def read(self, row: int, tokens: Sequence[int], *, every: bool = False) -> Decoded:
        """Append up to PREFILL tokens to a row's sequence; returns the logits of the last token, or of every one."""
        count = len(tokens)
        assert 0 < count <= PREFILL, f"{count} tokens at once"
        self._require_room([row], count)
        if self.kernel is not None and count <= self.kernel.most:
            start = self.cache.lengths[row]
            return self._step_kernel([row] * count, tokens, range(start, start + count), 0 if every else count - 1)
        return self._forward([row], [tokens], last=not every)

    def step(self, tokens: Mapping[int, int]) -> Decoded:
        """Append one token to the sequence of each given row; the result has one row for each, in ascending order."""
        rows = sorted(tokens)
        self._require_room(rows, 1)
        if self.kernel is not None:
            lengths = self.cache.lengths
            return self._step_kernel(rows, [tokens[row] for row in rows], [lengths[row] for row in rows])
        together = [[row] for row in rows] if self.strict else [rows]
        return Decoded.join([self._forward(some, [[tokens[row]] for row in some]) for some in together])

    def _step_kernel(
        self, rows: Sequence[int], tokens: Sequence[int], places: Sequence[int], first: int = 0
    ) -> Decoded:
        assert self.kernel is not None
        decoded = self.kernel.append(rows, tokens, places, first)
        for row in rows:
            self.cache.lengths[row] += 1
        return decoded

    def _require_room(self, rows: Sequence[int], count: int) -> None:
        longest = max(self.cache.lengths[row] for row in rows) + count
        if longest > self.capacity:  # the kernel would write beyond the row
            raise ValueError(f"{longest} tokens do not fit in a row of {self.capacity}")

    @torch.inference_mode()
    def _forward(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], last: bool = False) -> Decoded:
        config, cache = self.model.config, self.cache.select(rows)
        ids = torch.tensor(tokens, device=cache.held.device)
        output = self.model(ids, cache=cache, record=True, last=last)
        return Decoded.of(output, 0 if config.rule is None else config.rule.num_experts)

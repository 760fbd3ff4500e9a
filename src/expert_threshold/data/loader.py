"""Documents packed into one stream of tokens, and batches cut from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .sources import Corpus, Split
from .tokenizer import Tokenizer

IGNORED = -1
"""The target where there is none."""

_CHUNK_BYTES = 4_000_000

Ids = npt.NDArray[np.unsignedinteger[Any]]
"""uint16 where the vocabulary fits, else uint32."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """Document d is `ids[offsets[d] : offsets[d + 1]]` and begins with the tokenizer's `bos`.

    `ids` has shape (tokens,), `offsets` (documents + 1,); `bytes` is the length of the text in UTF-8.
    """

    ids: Ids
    offsets: npt.NDArray[np.int64]
    bytes: int

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1


@dataclass(frozen=True)
class Position:
    """Where the next batch begins: `row` rows into this epoch."""

    epoch: int = 0
    row: int = 0


class Batch(NamedTuple):
    """int64 token ids, and the ids that follow them; both of one shape, `(batch, context)` from a `Loader`."""

    tokens: Tensor
    targets: Tensor


def pack(
    corpus: Corpus, tokenizer: Tokenizer, split: Split, progress: Callable[[int, int], None] | None = None
) -> Tokens:
    """All documents of a split as tokens; `progress` is told the bytes done and the bytes in all now and then."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    documents = [np.empty(0, dtype)]
    done = 0
    for texts in _chunks(corpus.documents(split)):
        documents += [np.array([tokenizer.bos, *ids], dtype) for ids in tokenizer.encode_batch(texts)]
        done += sum(len(text.encode()) for text in texts)
        if progress is not None:
            progress(done, corpus.sizes[split].bytes)
    offsets = np.cumsum([len(document) for document in documents], dtype=np.int64)
    return Tokens(np.concatenate(documents), offsets, done)


def _chunks(texts: Iterator[str]) -> Iterator[list[str]]:
    """Lists of texts of a few megabytes each, so that threads have work and memory is bounded."""
    chunk: list[str] = []
    size = 0
    for text in texts:
        chunk.append(text)
        size += len(text)
        if size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class _Epoch:
    """The stream of one epoch, all documents in an order drawn from the seed and the epoch, cut into rows.

    The rows come in an order of their own: neighbours in a batch are then of different documents, however long.
    """

    def __init__(self, tokens: Tokens, context: int, seed: int, epoch: int) -> None:
        order = _shuffled(tokens.documents, seed, epoch, 0)
        self._ids = tokens.ids
        self._starts = np.concatenate([[0], np.cumsum(np.diff(tokens.offsets)[order])])
        self._shifts = tokens.offsets[order] - self._starts[:-1]
        self._context = context
        self._order = _shuffled(rows_per_epoch(tokens, context), seed, epoch, 1)

    def read(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Rows `first` to `last` of this epoch's order, each with the token that follows it; IGNORED past the end."""
        place = self._order[first:last, None] * self._context + np.arange(self._context + 1)
        end = self._starts[-1]
        # What follows the epoch's last token is the next epoch's first, which opens a document like the first here.
        inside = np.where(place < end, place, 0)
        document = np.searchsorted(self._starts, inside, side="right") - 1
        ids = self._ids[inside + self._shifts[document]].astype(np.int64)
        return np.where(place <= end, ids, IGNORED)


def _shuffled(count: int, seed: int, epoch: int, purpose: int) -> npt.NDArray[np.int64]:
    # A bit generator's raw output stays the same from one release of NumPy to the next, a permutation may not.
    return np.argsort(np.random.PCG64([seed, epoch, purpose]).random_raw(count), kind="stable")


def rows_per_epoch(tokens: Tokens, context: int) -> int:
    """Rows of `context` targets that one epoch is cut into, the last one filled up."""
    return -(-len(tokens) // context)


class Loader(Iterator[Batch]):
    """Endless batches of packed documents; documents, and rows of their stream, are shuffled anew in each epoch.

    Row r of the global batch of `ranks * batch_size` rows is the epoch's row `position.row + r`, running on into the
    next epoch; rank i has rows `i * batch_size` to `(i + 1) * batch_size`. Each token is a target once in an epoch; its
    last row is filled up with targets that are `IGNORED`. A batch depends on the position alone, not on earlier ones.

    Raises ValueError where the tokens do not fill one row, or the position is not one of theirs.
    """

    def __init__(
        self,
        tokens: Tokens,
        batch_size: int,
        context: int,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
        position: Position = Position(),
    ) -> None:
        assert batch_size > 0
        assert context > 0
        assert 0 <= rank < ranks
        if len(tokens) <= context:
            raise ValueError(
                f"context={context} needs at least {context + 1} tokens of text, there are {len(tokens)}: "
                "give more text or a shorter context"
            )
        self._rows = rows_per_epoch(tokens, context)
        if position.epoch < 0 or not 0 <= position.row < self._rows:
            raise ValueError(
                f"{position} is outside this corpus of {self._rows} rows: resume with the data the run began with"
            )
        self.position = position
        self._tokens = tokens
        self._batch_size = batch_size
        self._context = context
        self._seed = seed
        self._rank = rank
        self._ranks = ranks
        self._epochs: dict[int, _Epoch] = {}

    def __next__(self) -> Batch:
        rows = torch.from_numpy(self._read(self.position.row + self._rank * self._batch_size, self._batch_size))
        epochs, row = divmod(self.position.row + self._ranks * self._batch_size, self._rows)
        self.position = Position(self.position.epoch + epochs, row)
        return Batch(rows[:, :-1].clamp(min=0), rows[:, 1:].contiguous())

    def _read(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """`count` rows from `start`, counted from the beginning of the position's epoch."""
        parts = []
        while count > 0:
            epochs, row = divmod(start, self._rows)
            taken = min(count, self._rows - row)
            parts.append(self._epoch(self.position.epoch + epochs).read(row, row + taken))
            start += taken
            count -= taken
        return np.concatenate(parts)

    def _epoch(self, epoch: int) -> _Epoch:
        if epoch not in self._epochs:
            self._epochs = {e: stream for e, stream in self._epochs.items() if e >= self.position.epoch}
            self._epochs[epoch] = _Epoch(self._tokens, self._context, self._seed, epoch)
        return self._epochs[epoch]


def windows(tokens: Tokens, context: int) -> Iterator[Batch]:
    """For validation: rows of shape `(context,)` in the documents' order; each token but the first is a target once.

    The last window is filled up with targets that are `IGNORED`.
    """
    for start in range(0, len(tokens) - 1, context):
        ids = _tensor(tokens.ids[start : start + context + 1])
        padding = context + 1 - len(ids)
        yield Batch(
            torch.nn.functional.pad(ids[:-1], (0, padding)),
            torch.nn.functional.pad(ids[1:], (0, padding), value=IGNORED),
        )


def _tensor(ids: Ids) -> Tensor:
    return torch.from_numpy(ids.astype(np.int64))

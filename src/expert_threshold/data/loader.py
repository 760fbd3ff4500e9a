"""Documents packed into one stream of tokens, and batches cut from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from .sources import Corpus, Split
from .stream import Blocks, Stream, Whole, shuffled
from .tokenizer import Tokenizer
from .tokens import THREADS, Ids, Parts, Tokens, ahead, id_type, join, no_tokens, tokenize

IGNORED = -1
"""The target where there is none."""

_CHUNK_BYTES = 4_000_000


@dataclass(frozen=True)
class Position:
    """Where the next batch begins: `row` rows into this block of this epoch."""

    epoch: int = 0
    row: int = 0
    block: int = 0


class Batch(NamedTuple):
    """int64 token ids, and the ids that follow them; both of one shape, `(batch, context)` from a `Loader`."""

    tokens: Tensor
    targets: Tensor


def pack(
    corpus: Corpus,
    tokenizer: Tokenizer,
    split: Split,
    progress: Callable[[int, int], None] | None = None,
    max_tokens: int | None = None,
) -> Tokens:
    """The documents of a split as tokens in memory; `progress` is told the bytes done and the bytes in all.

    max_tokens: enough is what reaches so many, in whole parts; None is all.
    """
    packed = [no_tokens(id_type(tokenizer.vocab_size))]
    tokens = done = 0
    for part in _in_parts(corpus, tokenizer, split):
        packed.append(part)
        tokens += len(part)
        done += part.bytes
        if progress is not None:
            progress(done, max(done, corpus.sizes[split].bytes))
        if max_tokens is not None and tokens >= max_tokens:
            break
    return join(packed)


def _in_parts(corpus: Corpus, tokenizer: Tokenizer, split: Split) -> Iterator[Tokens]:
    if corpus.parts is None:
        return ahead(partial(tokenize, tokenizer=tokenizer), _chunks(corpus.documents(split)), THREADS)
    parts = corpus.parts(split, tokenizer)
    return ahead(parts.read, range(len(parts.bytes)), THREADS)


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


class _Rows:
    """A block of one epoch, all its documents in an order drawn from the seed, the epoch and the block, cut into rows.

    The rows come in an order of their own: neighbours in a batch are then of different documents, however long.
    """

    def __init__(self, tokens: Tokens, context: int, seed: int, epoch: int, block: int) -> None:
        # What the first block draws must never change: runs resume by their position alone.
        further = (block,) if block else ()
        order = shuffled(tokens.documents, seed, epoch, 0, *further)
        self._ids = tokens.ids
        self._starts = np.concatenate([[0], np.cumsum(np.diff(tokens.offsets)[order])])
        self._shifts = tokens.offsets[:-1][order] - self._starts[:-1]
        self._context = context
        self._order = shuffled(rows_per_epoch(tokens, context), seed, epoch, 1, *further)

    def __len__(self) -> int:
        return len(self._order)

    def targets(self, first: int, last: int) -> int:
        """Tokens that follow in the rows `first` to `last`, which are not IGNORED."""
        return int(np.minimum(self._starts[-1] - self._order[first:last] * self._context, self._context).sum())

    def read(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Rows `first` to `last` of this block's order, each with the token that follows it; IGNORED past the end."""
        rows = np.full((last - first, self._context + 1), IGNORED, np.int64)
        for row, place in zip(rows, self._order[first:last] * self._context, strict=True):
            self._fill(row, int(place))
        return rows

    def _fill(self, row: npt.NDArray[np.int64], place: int) -> None:
        """With the tokens from `place` of the stream on, document after document."""
        document = int(np.searchsorted(self._starts, place, side="right")) - 1
        filled = 0
        while filled < len(row) and place < self._starts[-1]:
            until = min(int(self._starts[document + 1]), place + len(row) - filled)
            shift = int(self._shifts[document])
            row[filled : filled + until - place] = self._ids[place + shift : until + shift]
            filled, place, document = filled + until - place, until, document + 1
        if filled < len(row):  # what comes next is the first token of a block, always `bos`
            row[filled] = self._ids[self._shifts[0]]


def rows_per_epoch(tokens: Tokens, context: int) -> int:
    """Rows of `context` targets that one epoch is cut into, the last one filled up."""
    return -(-len(tokens) // context)


class Loader(Iterator[Batch]):
    """Endless batches of packed documents; documents, and rows of their stream, are shuffled anew in each epoch.

    tokens: a split in memory, which is one block; or in parts, which `threads` read and tokenize ahead of the batches,
    a block of about 32 MB of text at a time, made of parts from all over the split.

    Row r of the global batch of `ranks * batch_size` rows is the block's row `position.row + r`, running on into the
    next block and epoch; rank i has rows `i * batch_size` to `(i + 1) * batch_size`. Each token is a target once in an
    epoch; a block's last row is filled up with targets that are `IGNORED`. A batch depends on the position alone, not
    on earlier batches, threads or the group. group: as `Stream` says, and skip_damaged.

    Raises ValueError where the tokens do not fill one row, the position is not one of theirs, or a part is damaged.
    """

    def __init__(
        self,
        tokens: Tokens | Parts,
        batch_size: int,
        context: int,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
        position: Position = Position(),
        *,
        threads: int = 1,
        group: dist.ProcessGroup | None = None,
        skip_damaged: bool = False,
    ) -> None:
        assert batch_size > 0
        assert context > 0
        assert 0 <= rank < ranks
        self.position = position
        self.targets = 0  # of the last batch, all ranks' together, without those that are IGNORED
        self._batch_size = batch_size
        self._context = context
        self._seed = seed
        self._rank = rank
        self._ranks = ranks
        self._now: tuple[tuple[int, int], _Rows] | None = None
        self._blocks: Blocks
        if isinstance(tokens, Tokens):
            if len(tokens) <= context:
                raise ValueError(
                    f"context={context} needs at least {context + 1} tokens of text, there are {len(tokens)}: "
                    "give more text or a shorter context"
                )
            self._blocks = Whole(tokens)
            self._rows_at(position)
        else:
            self._blocks = Stream(tokens, seed, threads=threads, group=group, skip_damaged=skip_damaged)

    def __next__(self) -> Batch:
        first, last, whole = (i * self._batch_size for i in (self._rank, self._rank + 1, self._ranks))
        seen, parts, position = 0, [], self.position
        empty = targets = 0
        while seen < whole:
            rows = self._rows_at(position)
            empty = 0 if len(rows) else empty + 1
            if empty > self._blocks.count(position.epoch):
                raise ValueError("no document of this corpus can be read: download or write it again")
            taken = min(whole - seen, len(rows) - position.row)
            mine = slice(max(first - seen, 0), min(last - seen, taken))
            if mine.start < mine.stop:
                parts.append(rows.read(position.row + mine.start, position.row + mine.stop))
            targets += rows.targets(position.row, position.row + taken)
            seen += taken
            position = self._after(position, taken, rows)
        self.position, self.targets = position, targets
        ids = torch.from_numpy(np.concatenate(parts))
        return Batch(ids[:, :-1].clamp(min=0), ids[:, 1:].contiguous())

    def take_skipped(self) -> list[str]:
        """A line for each damaged part that was left out since the last call."""
        lines, self._blocks.skipped = self._blocks.skipped, []
        return lines

    def close(self) -> None:
        """End the threads."""
        self._blocks.close()

    def _after(self, position: Position, rows_taken: int, rows: _Rows) -> Position:
        if position.row + rows_taken < len(rows):
            return Position(position.epoch, position.row + rows_taken, position.block)
        if position.block + 1 < self._blocks.count(position.epoch):
            return Position(position.epoch, 0, position.block + 1)
        return Position(position.epoch + 1, 0)

    def _rows_at(self, position: Position) -> _Rows:
        """The rows of the position's block. Raises ValueError if there is no such position."""
        place = position.epoch, position.block
        if position.epoch >= 0 and 0 <= position.block < self._blocks.count(position.epoch):
            if self._now is None or self._now[0] != place:
                self._now = None  # let go of the old block before there are two
                self._now = place, _Rows(self._blocks.load(*place), self._context, self._seed, *place)
            rows = self._now[1]
            if 0 <= position.row < max(len(rows), 1):
                return rows
        raise ValueError(f"{position} is not in this corpus: resume with the data the run began with")


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

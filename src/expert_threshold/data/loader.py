"""Packs documents into a stream of tokens and cuts it into batches. Threads prepare blocks of the stream in advance."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from .sources import Corpus, Split
from .tokenizer import Tokenizer
from .tokens import NOTHING, Parts, Tokens, ahead, join, tokenize

T = TypeVar("T")

IGNORED = -1
"""The target id that marks a position without a target."""
BLOCK_BYTES = 32 << 20
"""Bytes of text per block, about 7 million tokens. Blocks exceed batches because shuffling is within blocks."""
AHEAD_BLOCKS = 4
"""The maximum number of blocks that are prepared in advance."""
_CHUNK_BYTES = 4_000_000


@dataclass(frozen=True)
class Position:
    """Where the next batch starts: a row in a block of an epoch."""

    epoch: int = 0
    row: int = 0
    block: int = 0


class Batch(NamedTuple):
    """Token ids and their targets, the ids that follow. Both are int64 and, from a `Loader`, (batch, context)."""

    tokens: Tensor
    targets: Tensor


def pack(
    corpus: Corpus,
    tokenizer: Tokenizer,
    split: Split,
    progress: Callable[[int, int], None] | None = None,
    max_tokens: int | None = None,
) -> Tokens:
    """Tokenize the documents of a split into memory. `progress` is called with the bytes done and the total.

    max_tokens: stop after the part in which this number is reached. None packs the whole split.
    """
    if corpus.parts is None:
        found = ahead(partial(tokenize, tokenizer=tokenizer), _chunks(corpus.documents(split)))
    else:
        parts = corpus.parts(split, tokenizer)
        found = ahead(parts.read, range(len(parts.bytes)))
    packed, tokens, done = [NOTHING], 0, 0
    for part in found:
        packed.append(part)
        tokens += len(part)
        done += part.bytes
        if progress is not None:
            progress(done, max(done, corpus.sizes[split].bytes))
        if max_tokens is not None and tokens >= max_tokens:
            break
    return join(packed)


def _chunks(texts: Iterator[str]) -> Iterator[list[str]]:
    """Yield lists of texts of a few megabytes each: enough to keep threads busy without using much memory."""
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
    """A block of an epoch. Its documents are shuffled by seed, epoch and block, then cut into rows.

    The rows are shuffled too, so that neighbours in a batch come from different documents even if documents are long.
    """

    def __init__(self, tokens: Tokens, context: int, seed: int, epoch: int, block: int) -> None:
        # The first block's random numbers must never change, since runs resume by position alone.
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
        """Return how many targets in rows `first` to `last` are not IGNORED."""
        return int(np.minimum(self._starts[-1] - self._order[first:last] * self._context, self._context).sum())

    def read(self, first: int, last: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the tokens and the targets of rows `first` to `last` in shuffled order, each (rows, context).

        The last row is padded with the block's first tokens, whose targets are IGNORED. The padding is real text
        because it is routed too and competes with the other tokens.
        """
        places = self._order[first:last] * self._context
        rows = np.empty((last - first, self._context + 1), np.int64)
        for row, place in zip(rows, places, strict=True):
            self._fill(row, int(place))
        beyond = places[:, None] + np.arange(self._context) >= self._starts[-1]
        return rows[:, :-1], np.where(beyond, IGNORED, rows[:, 1:])

    def _fill(self, row: npt.NDArray[np.int64], place: int) -> None:
        """Fill the row with the block's tokens, starting at `place` and wrapping around at the end."""
        document = int(np.searchsorted(self._starts, place, side="right")) - 1
        filled = 0
        while filled < len(row):
            until = min(int(self._starts[document + 1]), place + len(row) - filled)
            shift = int(self._shifts[document])
            row[filled : filled + until - place] = self._ids[place + shift : until + shift]
            filled, place, document = filled + until - place, until, document + 1
            if document == len(self._shifts):
                place = document = 0


def rows_per_epoch(tokens: Tokens, context: int) -> int:
    """Return the number of rows of `context` targets in an epoch, including a partial last row."""
    return -(-len(tokens) // context)


def shuffled(count: int, *seed: int) -> npt.NDArray[np.int64]:
    """Return the integers below `count` in an order determined by the seed."""
    # NumPy keeps the raw output of a bit generator stable across releases, but not its permutations.
    return np.argsort(np.random.PCG64(seed).random_raw(count), kind="stable")


class Whole:
    """A split in memory, as a single block. It has the same methods as `Stream`."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def count(self, epoch: int) -> int:
        return 1

    def load(self, epoch: int, block: int) -> Tokens:
        return self._tokens


class Stream:
    """A split whose parts are shuffled for each epoch and grouped into blocks of about BLOCK_BYTES of text.

    threads: number of threads that read and tokenize in advance. group: the ranks that share this work. Each of them
    reads some parts and sends their tokens to the others when a block starts. With None, this rank reads everything.
    Neither option changes the contents of a block. If one rank cannot read a part, all ranks raise ValueError.
    """

    def __init__(self, parts: Parts, seed: int, threads: int = 1, group: dist.ProcessGroup | None = None) -> None:
        self._parts, self._bytes = parts, np.array(parts.bytes)
        self._seed = seed
        self._group = group
        self._rank, self._ranks = (0, 1) if group is None else (group.rank(), group.size())
        self._pool, self._threads = ThreadPoolExecutor(threads, "tokenize"), threads
        weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)  # or Python's exit waits for it
        self._layouts: dict[int, list[npt.NDArray[np.int64]]] = {}
        self._ahead: dict[tuple[int, int], list[Future[Tokens]]] = {}

    def count(self, epoch: int) -> int:
        """Return the number of blocks in an epoch, which is the same on every rank."""
        return len(self._layout(epoch))

    def load(self, epoch: int, block: int) -> Tokens:
        """Return the tokens of a block and prefetch the blocks that follow it."""
        if (epoch, block) not in self._ahead:
            self._forget()
            self._begin(epoch, block)
        share, fault = self._finish(self._ahead.pop((epoch, block)))
        for place in itertools.islice(self._after(epoch, block), AHEAD_BLOCKS):
            if sum(len(futures) for futures in self._ahead.values()) > 2 * self._threads:
                break
            self._begin(*place)
        shares = gather((share, fault), self._group)
        for _, fault in shares:
            if fault:
                raise ValueError(fault)
        return join([share for share, _ in shares])

    def _layout(self, epoch: int) -> list[npt.NDArray[np.int64]]:
        """Return, for each block of an epoch, the numbers of its parts."""
        if epoch not in self._layouts:
            order = shuffled(len(self._bytes), self._seed, epoch, 2)
            ends = np.cumsum(self._bytes[order])
            count = max(round(ends[-1] / BLOCK_BYTES), 1)
            block = (ends - self._bytes[order]) * count // ends[-1]  # the block in which each part starts
            self._layouts = {e: layout for e, layout in self._layouts.items() if e == epoch - 1}
            self._layouts[epoch] = np.split(order, np.flatnonzero(np.diff(block)) + 1)
        return self._layouts[epoch]

    def _after(self, epoch: int, block: int) -> Iterator[tuple[int, int]]:
        while True:
            block += 1
            if block == self.count(epoch):
                epoch, block = epoch + 1, 0
            yield epoch, block

    def _begin(self, epoch: int, block: int) -> None:
        """Start reading this rank's share of a block, unless that has started already."""
        if (epoch, block) not in self._ahead:
            mine = np.array_split(self._layout(epoch)[block], self._ranks)[self._rank]
            self._ahead[epoch, block] = [self._pool.submit(self._parts.read, int(part)) for part in mine]

    def _finish(self, futures: list[Future[Tokens]]) -> tuple[Tokens, str]:
        """Return this rank's share of a block and an error message, which is empty on success."""
        try:
            return join([NOTHING, *(future.result() for future in futures)]), ""
        except (ValueError, OSError) as error:
            return NOTHING, str(error)

    def _forget(self) -> None:
        for future in itertools.chain(*self._ahead.values()):
            future.cancel()
        self._ahead.clear()


def gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return the values of all ranks in rank order, or only this value if there is no group."""
    if group is None:
        return [value]
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value, group)
    return found


class Loader(Iterator[Batch]):
    """An endless iterator over batches of packed documents. Each epoch reshuffles the documents and their rows.

    tokens: a split in memory, which forms one block, or a split in parts, whose blocks contain about 32 MB of text from
    random parts. threads and group: as in `Stream`.

    Row r of the global batch of `ranks * batch_size` rows is row `position.row + r` of the block, continuing into the
    next block and epoch. Rank i gets rows `i * batch_size` to `(i + 1) * batch_size`. Each token is a target once per
    epoch. A batch depends only on the position, not on earlier batches, the threads or the group.

    Raises ValueError if the tokens do not fill one row, the position is out of range, or a part is damaged.
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
    ) -> None:
        assert batch_size > 0
        assert context > 0
        assert 0 <= rank < ranks
        self.position = position
        self.targets = 0  # number of targets in the last batch over all ranks, excluding IGNORED ones
        self._batch_size, self._context, self._seed = batch_size, context, seed
        self._rank, self._ranks = rank, ranks
        self._now: tuple[tuple[int, int], _Rows] | None = None
        self._blocks: Whole | Stream
        if isinstance(tokens, Tokens):
            if len(tokens) <= context:
                raise ValueError(
                    f"context={context} needs at least {context + 1} tokens of text, but there are only {len(tokens)}; "
                    "provide more text, or use a shorter context"
                )
            self._blocks = Whole(tokens)
            self._rows_at(position)
        else:
            self._blocks = Stream(tokens, seed, threads, group)

    def seek(self, position: Position) -> None:
        """Continue from another position. Raises ValueError if the corpus has no such position."""
        self._rows_at(position)
        self.position = position

    def __next__(self) -> Batch:
        first, last, whole = (i * self._batch_size for i in (self._rank, self._rank + 1, self._ranks))
        position, read = self.position, []
        seen = empty = targets = 0
        while seen < whole:
            rows = self._rows_at(position)
            empty = 0 if len(rows) else empty + 1
            if empty > self._blocks.count(position.epoch):
                raise ValueError("this corpus contains no readable document; download or create it again")
            taken = min(whole - seen, len(rows) - position.row)
            mine = slice(max(first - seen, 0), min(last - seen, taken))
            if mine.start < mine.stop:
                read.append(rows.read(position.row + mine.start, position.row + mine.stop))
            targets += rows.targets(position.row, position.row + taken)
            seen += taken
            position = self._after(position, taken, rows)
        self.position, self.targets = position, targets
        return Batch(*(torch.from_numpy(np.concatenate(parts)) for parts in zip(*read, strict=True)))

    def close(self) -> None:
        """Stop the threads. No more batches can be read."""
        del self._blocks

    def _after(self, position: Position, rows_taken: int, rows: _Rows) -> Position:
        if position.row + rows_taken < len(rows):
            return Position(position.epoch, position.row + rows_taken, position.block)
        if position.block + 1 < self._blocks.count(position.epoch):
            return Position(position.epoch, 0, position.block + 1)
        return Position(position.epoch + 1, 0)

    def _rows_at(self, position: Position) -> _Rows:
        """Return the rows of the position's block. Raises ValueError if there is no such position."""
        place = position.epoch, position.block
        if position.epoch >= 0 and 0 <= position.block < self._blocks.count(position.epoch):
            if self._now is None or self._now[0] != place:
                self._now = None  # free the old block before the new one is loaded
                self._now = place, _Rows(self._blocks.load(*place), self._context, self._seed, *place)
            rows = self._now[1]
            if 0 <= position.row < max(len(rows), 1):
                return rows
        raise ValueError(f"{position} is not in this corpus; resume with the data that the run was started with")


def windows(tokens: Tokens, context: int) -> Iterator[Batch]:
    """Yield rows `(context,)` in document order for validation. Every token except the first is a target once.

    The last window is padded, with `IGNORED` targets.
    """
    for start in range(0, len(tokens) - 1, context):
        ids = torch.from_numpy(tokens.ids[start : start + context + 1].astype(np.int64))
        padding = context + 1 - len(ids)
        yield Batch(
            torch.nn.functional.pad(ids[:-1], (0, padding)),
            torch.nn.functional.pad(ids[1:], (0, padding), value=IGNORED),
        )

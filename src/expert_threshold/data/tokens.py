"""Tokenized documents. A split is either in memory or divided into parts that are read on demand."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from .files import Shards
from .tokenizer import THREADS, Tokenizer

Item = TypeVar("Item")
Result = TypeVar("Result")

Ids = npt.NDArray[np.unsignedinteger[Any]]
"""Token ids: uint16 if the vocabulary is small enough, else uint32."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokenized documents. Document d is `ids[offsets[d] : offsets[d + 1]]` and starts with the tokenizer's `bos`.

    `ids` has shape (tokens,), and `offsets` has shape (documents + 1,). `bytes` is the size of the text in UTF-8.
    """

    ids: Ids
    offsets: npt.NDArray[np.int64]
    bytes: int

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1


NOTHING = Tokens(np.empty(0, np.uint8), np.zeros(1, np.int64), 0)
"""No documents. `join` accepts it beside ids of any dtype."""


class Parts(Protocol):
    """A split whose parts can be read independently, in any order and on any thread."""

    @property
    def bytes(self) -> Sequence[int]:
        """The size of each part's text in bytes, accurate to about one percent."""

    def read(self, part: int) -> Tokens:
        """Return the tokens of a part. Raises ValueError with the reason if it cannot be read."""


@dataclass(frozen=True)
class TextParts:
    """The row groups of shards, tokenized when they are read."""

    shards: Shards
    tokenizer: Tokenizer

    @property
    def bytes(self) -> Sequence[int]:
        return [group.bytes for group in self.shards.groups]

    def read(self, part: int) -> Tokens:
        return tokenize(self.shards.read(part), self.tokenizer)


def tokenize(texts: Iterable[str], tokenizer: Tokenizer) -> Tokens:
    """Tokenize documents on this thread. The GIL is mostly released, so other threads can run at the same time."""
    bos = np.array([tokenizer.bos], np.uint32)
    documents = [bos[:0]]
    size = 0
    for text in texts:
        documents.append(np.concatenate([bos, tokenizer.encode_array(text)]))
        size += len(text.encode())
    dtype: np.dtype[np.unsignedinteger[Any]] = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    ids = np.concatenate(documents, dtype=dtype, casting="same_kind")
    return Tokens(ids, np.cumsum([len(document) for document in documents], dtype=np.int64), size)


def join(parts: Sequence[Tokens]) -> Tokens:
    """Return all documents of one or more parts, in order."""
    starts = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
    offsets = [part.offsets[:-1] + start for part, start in zip(parts, starts[:-1], strict=True)]
    return Tokens(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([*offsets, starts[-1:]]),
        sum(part.bytes for part in parts),
    )


def ahead(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield `function(item)` for each item, in order. Threads compute a few results ahead of the consumer."""
    waiting: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(THREADS)
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)

"""Tokenized documents. A split is either in memory, or in parts that are read on demand."""

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
"""Token ids, as uint16 if the vocabulary is small enough, or else as uint32."""


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


class Parts(Protocol):
    """A split in parts that can each be read independently, in any order and on any thread."""

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """The dtype of the ids."""

    @property
    def bytes(self) -> Sequence[int]:
        """The size of each part's text in bytes, accurate to about one percent."""

    def read(self, part: int) -> Tokens:
        """Return the tokens of a part. Raises ValueError with the reason if it cannot be read."""


@dataclass(frozen=True)
class TextParts:
    """The row groups of shards, which are tokenized when they are read."""

    shards: Shards
    tokenizer: Tokenizer

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        return id_type(self.tokenizer.vocab_size)

    @property
    def bytes(self) -> Sequence[int]:
        return [group.bytes for group in self.shards.groups]

    def read(self, part: int) -> Tokens:
        return tokenize(self.shards.read(part), self.tokenizer)


def id_type(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the smallest dtype that can represent every id."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def no_tokens(dtype: np.dtype[np.unsignedinteger[Any]]) -> Tokens:
    """Return a `Tokens` without any documents."""
    return Tokens(np.empty(0, dtype), np.zeros(1, np.int64), 0)


def tokenize(texts: Iterable[str], tokenizer: Tokenizer) -> Tokens:
    """Tokenize documents on this thread. The GIL is mostly released, so other threads can run at the same time."""
    bos = np.array([tokenizer.bos], np.uint32)
    documents: list[npt.NDArray[np.uint32]] = []
    size = 0
    for text in texts:
        documents.append(np.concatenate([bos, tokenizer.encode_array(text)]))
        size += len(text.encode())
    kind = id_type(tokenizer.vocab_size)
    ids = np.concatenate(documents, dtype=kind, casting="same_kind") if documents else np.empty(0, kind)
    offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    return Tokens(ids, offsets, size)


def join(parts: Sequence[Tokens]) -> Tokens:
    """Return a `Tokens` with all documents of one or more parts, in order."""
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

"""The blocks of an epoch: the unit a loader holds in memory, prepared ahead by threads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from .tokens import Parts, Tokens, join, no_tokens

T = TypeVar("T")

BLOCK_BYTES = 32 << 20
"""Bytes of text in a block. Rows of a batch come from one block, so it is far larger: about 7 million tokens."""

AHEAD_BLOCKS = 4
"""The maximum number of blocks prepared at a time."""


def shuffled(count: int, *seed: int) -> npt.NDArray[np.int64]:
    """Return the numbers below `count` in an order drawn from the seed."""
    # NumPy keeps a bit generator's raw output stable across releases, but not its permutations.
    return np.argsort(np.random.PCG64(seed).random_raw(count), kind="stable")


class Whole:
    """A split in memory, as one block, with the methods of a `Stream`."""

    def __init__(self, tokens: Tokens) -> None:
        self.skipped: list[str] = []
        self._tokens = tokens

    def count(self, epoch: int) -> int:
        return 1

    def load(self, epoch: int, block: int) -> Tokens:
        return self._tokens

    def close(self) -> None:
        pass


class Stream:
    """Parts in an order drawn from the seed and the epoch, about BLOCK_BYTES of text per block.

    threads: how many read and tokenize ahead. group: ranks that share this work, each reading its own parts and sending
    the tokens to the others when a block begins; None reads everything here. Neither changes a block's contents.
    skip_damaged: skip unreadable parts and list those of all ranks in `skipped`, until the caller clears it; otherwise
    they raise ValueError on all ranks.
    """

    def __init__(
        self,
        parts: Parts,
        seed: int,
        *,
        threads: int = 1,
        group: dist.ProcessGroup | None = None,
        skip_damaged: bool = False,
    ) -> None:
        self.skipped: list[str] = []
        self._parts = parts
        self._bytes = np.array(parts.bytes)
        self._seed = seed
        self._group = group
        self._rank, self._ranks = (0, 1) if group is None else (group.rank(), group.size())
        self._skip_damaged = skip_damaged
        self._pool = ThreadPoolExecutor(threads, "tokenize")
        self._threads = threads
        self._layouts: dict[int, list[npt.NDArray[np.int64]]] = {}
        self._ahead: dict[tuple[int, int], list[Future[Tokens]]] = {}

    def count(self, epoch: int) -> int:
        """Return the number of blocks in that epoch, the same on every rank."""
        return len(self._layout(epoch))

    def load(self, epoch: int, block: int) -> Tokens:
        """Return a block; any may be requested, and the next ones in order are prefetched."""
        if (epoch, block) not in self._ahead:
            self._forget()
            self._begin(epoch, block)
        share, fault, skipped = self._finish(self._ahead.pop((epoch, block)))
        for place in itertools.islice(self._after(epoch, block), AHEAD_BLOCKS):
            if sum(len(futures) for futures in self._ahead.values()) > 2 * self._threads:
                break
            self._begin(*place)
        shares = gather((share, fault, skipped), self._group)
        for _, fault, skipped in shares:
            self.skipped += skipped
            if fault:
                raise ValueError(fault)
        return join([share for share, _, _ in shares])

    def close(self) -> None:
        """End the threads; no more blocks may be loaded."""
        self._forget()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _layout(self, epoch: int) -> list[npt.NDArray[np.int64]]:
        """Return the parts of each block."""
        if epoch not in self._layouts:
            order = shuffled(len(self._bytes), self._seed, epoch, 2)
            ends = np.cumsum(self._bytes[order])
            count = max(round(ends[-1] / BLOCK_BYTES), 1)
            block = (ends - self._bytes[order]) * count // ends[-1]  # by where each part begins
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
        """Start the threads on this rank's share of a block, unless they have started."""
        if (epoch, block) not in self._ahead:
            mine = np.array_split(self._layout(epoch)[block], self._ranks)[self._rank]
            self._ahead[epoch, block] = [self._pool.submit(self._parts.read, int(part)) for part in mine]

    def _finish(self, futures: list[Future[Tokens]]) -> tuple[Tokens, str, list[str]]:
        """Return the share, the fault that ended it, empty if there is none, and the faults that were skipped."""
        share, skipped = [no_tokens(self._parts.dtype)], list[str]()
        for future in futures:
            try:
                share.append(future.result())
            except (ValueError, OSError) as error:
                if not self._skip_damaged or isinstance(error, OSError):
                    return join(share), str(error), skipped
                skipped.append(str(error))
        return join(share), "", skipped

    def _forget(self) -> None:
        for future in itertools.chain(*self._ahead.values()):
            future.cancel()
        self._ahead.clear()


def gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return the values of all ranks in rank order; only this one without a group."""
    if group is None:
        return [value]
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value, group)
    return found

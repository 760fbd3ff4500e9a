"""Tokenized documents. A split is either in memory or divided into parts that are read on demand.

The tokens of a part can be stored in a file, so that shards are tokenized only once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ..files import read_json, replace_json, replacing
from .files import Shards
from .tokenizer import THREADS, Tokenizer

FORMAT, VERSION = "expert-threshold tokens", 2
MANIFEST, TOKENIZER = "tokens.json", "tokenizer.json"
CONTINUE = "remove it and continue with et data tokenize"

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


@dataclass(frozen=True)
class TokenParts:
    """One split of a token folder. bytes: the size of each part's text, as recorded in the manifest."""

    folder: Path
    bytes: Sequence[int]

    def read(self, part: int) -> Tokens:
        path = _part_path(self.folder, part)
        try:
            with path.open("rb") as file, np.load(file) as arrays:  # checks the CRC-32 of each array
                ids, offsets, size = (arrays[name] for name in ("ids", "offsets", "bytes"))
        except Exception as error:  # damage to the archive or to an array can raise almost anything
            if isinstance(error, OSError) and error.errno is not None and path.exists():
                raise
            raise ValueError(f"{path} is missing or damaged ({error}); {CONTINUE}") from None
        return Tokens(ids, offsets, int(size))

    def texts(self, tokenizer: Tokenizer) -> Iterator[str]:
        """Yield the texts of all documents."""
        for tokens in map(self.read, range(len(self.bytes))):
            for start, end in pairwise(tokens.offsets):
                yield tokenizer.decode(tokens.ids[start + 1 : end].tolist())


def write_tokens(
    folder: Path,
    splits: Mapping[str, Parts],
    tokenizer: Tokenizer,
    about: Mapping[str, Any],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Tokenize every part of every split into a folder, skipping parts that it already contains.

    about: facts about the text, to be added to the manifest. Raises ValueError if the folder contains tokens of another
    text or tokenizer, or if a part is damaged.
    """
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "finished": False,
        "tokenizer": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "bytes": {split: list(parts.bytes) for split, parts in splits.items()},
        **about,
    }
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / MANIFEST).exists():
        if read_json(folder / MANIFEST) | {"finished": False} != manifest:
            raise ValueError(f"--out {folder} contains tokens of another text or tokenizer; use another --out")
    elif any(folder.iterdir()):
        raise ValueError(f"--out {folder} already exists and is not a token folder; use another --out")
    replace_json(folder / MANIFEST, manifest)  # written first, so that the work can be continued even after a full disk
    tokenizer.save(folder / TOKENIZER)
    total, done = sum(sum(parts.bytes) for parts in splits.values()), 0
    for split, parts in splits.items():
        (folder / split).mkdir(exist_ok=True)
        missing = [part for part in range(len(parts.bytes)) if not _part_path(folder / split, part).exists()]
        done += sum(parts.bytes) - sum(parts.bytes[part] for part in missing)
        for part, tokens in zip(missing, ahead(parts.read, missing), strict=True):
            with replacing(_part_path(folder / split, part)) as temporary, temporary.open("wb") as file:
                np.savez(file, ids=tokens.ids, offsets=tokens.offsets, bytes=tokens.bytes)
            done += parts.bytes[part]
            if progress is not None:
                progress(done, total)
    replace_json(folder / MANIFEST, manifest | {"finished": True})


def _part_path(folder: Path, part: int) -> Path:
    return folder / f"{part:06}.npz"


def open_tokens(folder: Path) -> tuple[dict[str, Any], Tokenizer, dict[str, TokenParts]]:
    """Return the manifest, the tokenizer and the splits of a token folder. Raises ValueError if it is unfinished."""
    manifest = read_json(folder / MANIFEST)
    if (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
        raise ValueError(f"{folder} contains no tokens that this version can read; create them with et data tokenize")
    if not manifest["finished"]:
        raise ValueError(f"{folder} is not finished; resume with et data tokenize --out {folder}")
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    if tokenizer.hash != manifest["tokenizer"]:
        raise ValueError(f"{folder / TOKENIZER} is not the tokenizer of these tokens; restore the file from a backup")
    return manifest, tokenizer, {split: TokenParts(folder / split, sizes) for split, sizes in manifest["bytes"].items()}

"""Tokens on disk: shards tokenized once, memory-mapped, with the same parts as the shards."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ..files import read_json, replace_json
from .tokenizer import Tokenizer
from .tokens import Parts, Tokens, ahead, no_tokens

FORMAT, VERSION = "expert-threshold tokens", 1
MANIFEST, TOKENIZER = "tokens.json", "tokenizer.json"
LENGTH = np.dtype(np.uint32)
"""The dtype of a document's length, in tokens."""


@dataclass(frozen=True)
class IndexEntry:
    """A part's line in the index; parts are stored in order.

    bytes: of its text; shard_bytes: as estimated by the shard, to the percent. fault: why it could not be read; such a
    part is empty.
    """

    documents: int
    tokens: int
    bytes: int
    shard_bytes: int
    sha256: str
    fault: str | None = None


class TokenParts:
    """A split of a token folder. Raises ValueError if a file is damaged."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype[np.unsignedinteger[Any]]) -> None:
        self.dtype = dtype
        self._path = folder / f"{split}.ids"
        self._parts = read_index(folder / f"{split}.jsonl")
        self._tokens = [0, *accumulate(part.tokens for part in self._parts)]
        self._documents = [0, *accumulate(part.documents for part in self._parts)]
        self._ids = _mapped(self._path, dtype, self._tokens[-1])
        self._lengths = _mapped(folder / f"{split}.lengths", LENGTH, self._documents[-1])

    @property
    def bytes(self) -> list[int]:
        return [part.shard_bytes for part in self._parts]

    def read(self, part: int) -> Tokens:
        known = self._parts[part]
        if known.fault is not None:
            raise ValueError(known.fault)
        ids = self._ids[self._tokens[part] : self._tokens[part + 1]]
        lengths = self._lengths[self._documents[part] : self._documents[part + 1]]
        if _digest(ids, lengths) != known.sha256:
            raise ValueError(f"{self._path}, part {part} is damaged: make the folder again with et data tokenize")
        return Tokens(ids, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), known.bytes)

    def texts(self, tokenizer: Tokenizer) -> Iterator[str]:
        """Yield the documents' texts."""
        for part in range(len(self._parts)):
            tokens = self.read(part)
            for start, end in zip(tokens.offsets[:-1], tokens.offsets[1:], strict=True):
                yield tokenizer.decode(tokens.ids[start + 1 : end].tolist())


def write_tokens(
    folder: Path,
    splits: Mapping[str, Parts],
    tokenizer: Tokenizer,
    about: Mapping[str, Any],
    *,
    skip_damaged: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Tokenize every part of every split into a folder, resuming an interrupted one.

    about: facts on the text for the manifest. Returns a line for each skipped part.
    Raises ValueError if the folder is complete or holds other text or another tokenizer's tokens, and for a damaged
    part unless `skip_damaged`.
    """
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "finished": False,
        "tokenizer": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        **about,
    }
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / MANIFEST).exists():
        if read_json(folder / MANIFEST) != manifest:
            raise ValueError(f"--out {folder}: is complete, or of other text or another tokenizer; name another --out")
    elif any(folder.iterdir()):
        raise ValueError(f"--out {folder}: already exists and is not a token folder; name another --out")
    replace_json(folder / MANIFEST, manifest)  # first, since the folder is continued by it even after a full disk
    tokenizer.save(folder / TOKENIZER)
    total, done = sum(sum(parts.bytes) for parts in splits.values()), 0
    for split, parts in splits.items():
        for size in _write_split(folder, split, parts, skip_damaged):
            done += size
            if progress is not None:
                progress(done, total)
    replace_json(folder / MANIFEST, manifest | {"finished": True})
    return [part.fault for split in splits for part in read_index(folder / f"{split}.jsonl") if part.fault]


def _write_split(folder: Path, split: str, parts: Parts, skip_damaged: bool) -> Iterator[int]:
    """Append the missing parts; yield the size of each, as the shard states it, once it is written."""
    index, ids, lengths = (folder / f"{split}.{kind}" for kind in ("jsonl", "ids", "lengths"))
    sizes = parts.bytes
    there = _whole(read_index(index), ids, lengths, parts.dtype)
    yield sum(sizes[: len(there)])
    index.touch()
    with index.open("r+b") as index_file, ids.open("r+b") as ids_file, lengths.open("r+b") as lengths_file:
        index_file.write(b"".join(map(_line, there)))  # as they are, so that they survive a kill here
        index_file.truncate()
        ids_file.truncate(sum(part.tokens for part in there) * parts.dtype.itemsize)
        lengths_file.truncate(sum(part.documents for part in there) * LENGTH.itemsize)
        for file in (ids_file, lengths_file):
            file.seek(0, os.SEEK_END)
        read = partial(_read, parts, skip_damaged)
        for tokens, fault in ahead(read, range(len(there), len(sizes))):
            counts = np.diff(tokens.offsets).astype(LENGTH)
            ids_file.write(tokens.ids.tobytes())
            lengths_file.write(counts.tobytes())
            there.append(
                IndexEntry(
                    tokens.documents,
                    len(tokens),
                    tokens.bytes,
                    sizes[len(there)],
                    _digest(tokens.ids, counts),
                    fault,
                )
            )
            for file in (ids_file, lengths_file):  # before the index line that records them
                file.flush()
            index_file.write(_line(there[-1]))
            index_file.flush()
            yield there[-1].shard_bytes


def _read(parts: Parts, skip_damaged: bool, part: int) -> tuple[Tokens, str | None]:
    try:
        return parts.read(part), None
    except ValueError as error:
        if not skip_damaged:
            raise
        return no_tokens(parts.dtype), str(error)


def read_index(path: Path) -> list[IndexEntry]:
    """Return the parts in the index, without an incomplete last line."""
    found: list[IndexEntry] = []
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    with suppress(ValueError, TypeError):
        found.extend(IndexEntry(**json.loads(line)) for line in lines)
    return found


def _whole(
    parts: list[IndexEntry], ids: Path, lengths: Path, dtype: np.dtype[np.unsignedinteger[Any]]
) -> list[IndexEntry]:
    """Return the leading parts that the files hold completely; create missing files."""
    for path in (ids, lengths):
        path.touch()
    tokens, documents = ids.stat().st_size // dtype.itemsize, lengths.stat().st_size // LENGTH.itemsize
    fits = zip(accumulate(part.tokens for part in parts), accumulate(part.documents for part in parts), strict=True)
    return parts[: sum(end <= tokens and last <= documents for end, last in fits)]


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a finished token folder. Raises ValueError if it is not one."""
    manifest = read_json(folder / MANIFEST)
    if (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
        raise ValueError(f"{folder} holds no tokens that this version can read: make them with et data tokenize")
    if not manifest["finished"]:
        raise ValueError(f"{folder} is not finished: resume with et data tokenize --out {folder}")
    return manifest


def _line(part: IndexEntry) -> bytes:
    return json.dumps(asdict(part)).encode() + b"\n"


def _digest(ids: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> str:
    digest = hashlib.sha256(ids.tobytes())
    digest.update(lengths.tobytes())
    return digest.hexdigest()


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> np.ndarray[Any, Any]:
    """Return the numbers in a file, memory-mapped. Raises ValueError unless there are exactly `count`."""
    size = path.stat().st_size if path.exists() else 0
    if size != count * dtype.itemsize:
        raise ValueError(
            f"{path} has {size} bytes instead of {count * dtype.itemsize}: restore it from a copy, or make the folder "
            "again with et data tokenize"
        )
    return np.memmap(path, dtype, mode="r") if count else np.empty(0, dtype)

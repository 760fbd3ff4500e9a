"""Stores tokens on disk, in one file per part, so that shards are tokenized only once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..files import read_json, replace_json, replacing
from .tokenizer import Tokenizer
from .tokens import Parts, Tokens, ahead

FORMAT, VERSION = "expert-threshold tokens", 2
MANIFEST, TOKENIZER = "tokens.json", "tokenizer.json"
CONTINUE = "remove it and continue with et data tokenize"


@dataclass(frozen=True)
class TokenParts:
    """One split of a token folder. bytes: the size of each part's text, as recorded in the manifest."""

    folder: Path
    bytes: Sequence[int]

    def read(self, part: int) -> Tokens:
        path = _path(self.folder, part)
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
        missing = [part for part in range(len(parts.bytes)) if not _path(folder / split, part).exists()]
        done += sum(parts.bytes) - sum(parts.bytes[part] for part in missing)
        for part, tokens in zip(missing, ahead(parts.read, missing), strict=True):
            with replacing(_path(folder / split, part)) as temporary, temporary.open("wb") as file:
                np.savez(file, ids=tokens.ids, offsets=tokens.offsets, bytes=tokens.bytes)
            done += parts.bytes[part]
            if progress is not None:
                progress(done, total)
    replace_json(folder / MANIFEST, manifest | {"finished": True})


def _path(folder: Path, part: int) -> Path:
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

"""Parquet shards: text read by row group, so that it need not fit into memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .files import RowGroup, footer, read_row_group, row_groups


@dataclass(frozen=True)
class Shards:
    """A corpus of shards. `hash` covers their names, the text's column, and footers, which have all sizes and offsets.

    skipped: a line for each shard, or part of one, that was left out; damaged parts are, too, if `skip_damaged`.
    """

    groups: tuple[RowGroup, ...]
    text_field: str
    hash: str
    skip_damaged: bool = False
    skipped: list[str] = field(default_factory=list)

    @property
    def documents(self) -> int:
        return sum(group.documents for group in self.groups)

    @property
    def bytes(self) -> int:
        """The bytes of text, to the nearest percent."""
        return sum(group.bytes for group in self.groups)

    def read(self, group: int) -> Iterator[str]:
        """Yield the documents of a row group that are not blank. Raises ValueError naming a damaged shard."""
        return (text for text in read_row_group(self.groups[group], self.text_field) if text and text.strip())

    def texts(self) -> Iterator[str]:
        """Yield all documents, in the shards' order. Raises ValueError as `read` does, unless `skip_damaged`."""
        for group in range(len(self.groups)):
            try:
                yield from self.read(group)
            except ValueError as error:
                if not self.skip_damaged:
                    raise
                self.skipped.append(str(error))


def open_shards(paths: Sequence[Path], text_field: str, skip_damaged: bool) -> Shards:
    """Return the shards, reading only their footers.

    Raises ValueError naming a shard that is damaged, empty or lacks the column, unless `skip_damaged`.
    """
    digest = hashlib.sha256(f"{text_field}\n".encode())
    groups: list[RowGroup] = []
    skipped: list[str] = []
    for path in paths:
        try:
            found = [group for group in row_groups(path, text_field) if group.documents]
            if not found:
                raise ValueError(f"{path} has no documents: put some into it, or remove it")
        except ValueError as error:
            if not skip_damaged:
                raise
            skipped.append(str(error))
            continue
        groups += found
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(footer(path))
    return Shards(tuple(groups), text_field, digest.hexdigest(), skip_damaged, skipped)

"""Reads documents from .txt, .jsonl and .parquet files and from folders of them. All but .parquet may be compressed."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

import pyarrow
import pyarrow.parquet

SUFFIXES = (".parquet", ".jsonl", ".txt")
"""The supported kinds of files, in order of preference. A folder may mix them because data sets come with notes."""

PACKED = {".gz": "gzip", ".zst": "zstd"}
SECTION_BYTES = 8192
_PARQUET_ROWS = 256
_KINDS = ".txt, .jsonl or .parquet"
VALIDATION = "validation|valid|val|dev"
HELD_OUT = f"test|{VALIDATION}"


def kind(path: Path) -> str:
    """Return the suffix that determines how to read a file, such as `.jsonl` for a.jsonl.gz."""
    return (path.with_suffix("") if path.suffix.lower() in PACKED else path).suffix.lower()


def find(path: Path) -> list[Path]:
    """Return `path` itself if it is a file, or all visible files of one kind in the folder, sorted by path.

    Symbolic links are followed. Dangling ones are returned too, so that reading them raises FileNotFoundError.
    Raises ValueError if there is nothing to read, and OSError if a folder cannot be read.
    """
    if path.is_dir():
        files = visible(path)
        for suffix in SUFFIXES:
            if found := [file for file in files if kind(file) == suffix]:
                return found
        raise ValueError(f"{path} contains no {_KINDS} file; add one, or use another folder")
    if not path.exists():
        raise ValueError(f'{path} does not exist; use "embedded", a {_KINDS} file, or a folder of such files')
    if kind(path) not in SUFFIXES:
        raise ValueError(f"{path} is not a {_KINDS} file; convert it, or rename it if it is one")
    return [path]


def visible(root: Path) -> list[Path]:
    """Return all visible files in a folder and its subfolders, sorted by path. Raises the same OSErrors as `find`."""
    found, seen = [], set()
    for folder, folders, names in os.walk(root, onerror=_refuse, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if (real := os.path.realpath(folder)) in seen:  # following a link to a parent folder would never end
            folders.clear()
            continue
        seen.add(real)
        files = (Path(folder, name) for name in names if not name.startswith("."))
        found += [file for file in files if file.is_file() or not file.exists()]
    return sorted(found)


def _refuse(error: OSError) -> NoReturn:
    raise error


def held_out(root: Path, paths: Sequence[Path], words: str = HELD_OUT) -> list[Path]:
    """Return the files with a name, or a parent folder below `root`, that starts with one of the words.

    Examples are test.jsonl, validation-00000-of-00001.parquet, val_0.txt and dev/a.txt.
    """
    named = re.compile(rf"({words})([-.]|_\d|$)", re.IGNORECASE)
    names = {path: (path.name,) if path == root else path.relative_to(root).parts for path in paths}
    return [path for path in paths if any(map(named.match, names[path]))]


def read(path: Path, text_field: str) -> Iterator[str | None]:
    """Yield the documents of a file: its whole text, or the `text_field` of each line or row, with None for nulls.

    Raises ValueError if the file does not match its suffix or lacks the field.
    """
    if kind(path) == ".txt":
        return iter(["".join(lines(path))])
    return (_jsonl if kind(path) == ".jsonl" else _parquet)(path, text_field)


def sections(path: Path) -> Iterator[str]:
    """Split a long text into documents at the first blank line after 8 KiB, or at the first line end after 16 KiB.

    Lines longer than 16 KiB are split at whitespace, including the carriage returns of old Macintosh files.
    Concatenating the documents restores the text.
    """
    section: list[str] = []
    size = 0
    for line in lines(path):
        for piece in [line] if len(line) <= 2 * SECTION_BYTES else _PIECE.findall(line):
            section.append(piece)
            size += len(piece.encode())
            if size >= 2 * SECTION_BYTES or (size >= SECTION_BYTES and not piece.strip()):
                yield "".join(section)
                section, size = [], 0
    if section:
        yield "".join(section)


_PIECE = re.compile(r"[^\r\n]{0,1024}(?:\r\n|\s)|.{1,1024}", re.DOTALL)


def lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file, with their line endings but without a byte order mark."""
    offset, codec = 0, PACKED.get(path.suffix.lower())
    with (
        _damage_named(path, codec or "text"),
        io.BufferedReader(pyarrow.input_stream(str(path), codec)) if codec else path.open("rb") as file,
    ):
        for data in file:
            try:
                line = data.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path} is not valid UTF-8 at byte {offset + error.start}; convert it, for example with iconv"
                ) from None
            yield line.removeprefix("\ufeff") if offset == 0 else line
            offset += len(data)


def _jsonl(path: Path, text_field: str) -> Iterator[str | None]:
    for number, line in enumerate(lines(path), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = str(error).partition(":")[0]
            raise ValueError(f"{place} is not valid JSON ({reason}); each must be an object") from None
        if not isinstance(record, dict):
            raise ValueError(f"{place} is not a JSON object; each line must be one")
        text = record.get(text_field, ...)
        if not isinstance(text, str | None):
            texts = ", ".join(key for key, value in record.items() if isinstance(value, str)) or "none"
            raise ValueError(f"{place} has no text in text_field={text_field!r}; the fields with text are {texts}")
        try:
            (text or "").encode()
        except UnicodeEncodeError:
            raise ValueError(f"{place} contains an unpaired surrogate; repair or remove the line") from None
        yield text


class RowGroup(NamedTuple):
    """A row group of a Parquet file."""

    path: Path
    number: int
    documents: int
    bytes: int  # size of the text, accurate to about one percent
    nulls: int  # number of rows without text; 0 if the footer does not record it


def _row_groups(path: Path, text_field: str) -> list[RowGroup]:
    """Return the row groups listed in the file's footer, without reading text. Raises ValueError as `read` does."""
    with _parquet_file(path, text_field) as file:
        leaves = [file.schema.column(i).path for i in range(len(file.schema))]  # a nested column has several leaves
        place = leaves.index(text_field)
        found = []
        for index in range(file.num_row_groups):
            group = file.metadata.row_group(index)
            column = group.column(place)
            nulls = column.statistics.null_count if column.statistics and column.statistics.has_null_count else 0
            found.append(RowGroup(path, index, group.num_rows - nulls, column.total_uncompressed_size, nulls))
        return found


def _footer(path: Path) -> bytes:
    """Return the footer of a Parquet file, which lists all offsets and sizes and so identifies the file's contents."""
    with path.open("rb") as file:
        file.seek(-8, os.SEEK_END)
        length = int.from_bytes(file.read(4), "little")
        file.seek(-8 - length, os.SEEK_END)
        return file.read(length)


@dataclass(frozen=True)
class Shards:
    """One split of Parquet shards. `hash` covers their names, sizes and footers, and `text_field`."""

    groups: tuple[RowGroup, ...]
    text_field: str
    hash: str

    def read(self, group: int) -> Iterator[str]:
        """Yield the non-blank documents of a row group. Raises ValueError naming the shard if it is damaged."""
        path, number = self.groups[group][:2]
        return (text for text in _parquet(path, self.text_field, [number]) if text and text.strip())

    def texts(self) -> Iterator[str]:
        """Yield all documents, shard by shard. Raises ValueError as `read` does."""
        for group in range(len(self.groups)):
            yield from self.read(group)


def open_shards(paths: Sequence[Path], text_field: str) -> Shards:
    """Open Parquet files, reading only footers. Raises ValueError if one is damaged or empty or lacks the column."""
    digest = hashlib.sha256(f"{text_field}\n".encode())
    groups: list[RowGroup] = []
    for path in paths:
        found = [group for group in _row_groups(path, text_field) if group.documents]
        if not found:
            raise ValueError(f"{path} contains no documents; add some, or remove the file")
        groups += found
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(_footer(path))
    return Shards(tuple(groups), text_field, digest.hexdigest())


def _parquet(path: Path, text_field: str, groups: Sequence[int] | None = None) -> Iterator[str | None]:
    with _parquet_file(path, text_field) as file:
        chosen = range(file.num_row_groups) if groups is None else groups
        row = sum(file.metadata.row_group(index).num_rows for index in range(chosen[0] if chosen else 0))
        for batch in file.iter_batches(_PARQUET_ROWS, row_groups=list(chosen), columns=[text_field]):
            for value in batch.column(text_field):  # some versions of Arrow also read text.lang
                try:
                    text = value.as_py()
                    yield text.decode() if isinstance(text, bytes) else text
                except UnicodeDecodeError:
                    raise ValueError(f"{path}, row {row} is not valid UTF-8; rewrite the file as UTF-8") from None
                row += 1


@contextmanager
def _parquet_file(path: Path, text_field: str) -> Iterator[pyarrow.parquet.ParquetFile]:
    """Yield the open file. Raises ValueError if the column is missing, or if reading it reveals damage."""
    # Page checksums are optional in Parquet. Without them, a changed character may go unnoticed.
    with _damage_named(path, "Parquet"), pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
        columns = file.schema_arrow
        if text_field not in columns.names:
            names = ", ".join(columns.names)
            raise ValueError(f"{path} has no column text_field={text_field!r}; its columns are {names}")
        if columns.names.count(text_field) > 1:
            raise ValueError(f"{path} has several columns text_field={text_field!r}; rewrite it with only one of them")
        held = columns.field(text_field).type
        values = held.value_type if isinstance(held, pyarrow.DictionaryType) else held  # pandas' categoricals
        if str(values) not in _TEXTS:
            raise ValueError(f"{path}, column text_field={text_field!r} contains {held}; choose a column of strings")
        yield file


_TEXTS = {"string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null"}


@contextmanager
def _damage_named(path: Path, what: str) -> Iterator[None]:
    """Convert Arrow's errors about damage to a ValueError that names the file."""
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        # Arrow reports damage as OSError too, but without an errno.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is damaged or not a {what} file ({reason}); download or create it again") from None

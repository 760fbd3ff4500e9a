"""Reads documents from .txt, .jsonl and .parquet, one file or a folder of them, in bounded memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pyarrow
import pyarrow.parquet

SUFFIXES = (".parquet", ".jsonl", ".txt")
"""The order of precedence if a folder holds several kinds, since data sets often come with notes."""

SECTION_BYTES = 8192
_PARQUET_ROWS = 256


def find(path: Path) -> list[Path]:
    """Return `path` itself, or the files of one kind below that folder, hidden ones excluded, sorted by path.

    Raises ValueError if there is nothing to read.
    """
    if path.is_dir():
        visible = [
            file
            for file in sorted(path.rglob("*"))
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]
        for suffix in SUFFIXES:
            if found := [file for file in visible if file.suffix.lower() == suffix]:
                return found
        raise ValueError(f"{path} holds no {_KINDS} file: put some there, or name another folder")
    if not path.exists():
        raise ValueError(f'{path} does not exist: give "embedded", or a {_KINDS} file, or a folder of such')
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path} is no {_KINDS} file: convert it, or rename it if it is one")
    return [path]


_KINDS = ".txt, .jsonl or .parquet"


def read(path: Path, text_field: str) -> Iterator[str]:
    """Yield the documents of one file: a whole text file, the `text_field` of each line, or that column.

    Raises ValueError if the file does not match its suffix or lacks the field.
    """
    match path.suffix.lower():
        case ".txt":
            return iter(["".join(_lines(path))])
        case ".jsonl":
            return _jsonl(path, text_field)
        case ".parquet":
            return _parquet(path, text_field)
        case suffix:
            raise AssertionError(suffix)


def sections(path: Path) -> Iterator[str]:
    """Yield one long text as documents, cut at the first blank line after 8 KiB, or the first line's end after 16 KiB.

    Concatenated, they give the text.
    """
    section: list[str] = []
    size = 0
    for line in _lines(path):
        section.append(line)
        size += len(line.encode())
        if size >= 2 * SECTION_BYTES or (size >= SECTION_BYTES and not line.strip()):
            yield "".join(section)
            section, size = [], 0
    if section:
        yield "".join(section)


def _lines(path: Path) -> Iterator[str]:
    """Yield lines with their line ends unchanged, without a byte order mark."""
    offset = 0
    with path.open("rb") as file:
        for data in file:
            try:
                line = data.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path} is not UTF-8 at byte {offset + error.start}: convert it, for example with iconv"
                ) from None
            yield line.removeprefix("\ufeff") if offset == 0 else line
            offset += len(data)


def _jsonl(path: Path, text_field: str) -> Iterator[str]:
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = str(error).partition(":")[0]
            raise ValueError(f"{path}, line {number} is not JSON ({reason}): each line must be one object") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number} is not a JSON object: each line must be one")
        text = record.get(text_field)
        if not isinstance(text, str):
            texts = ", ".join(key for key, value in record.items() if isinstance(value, str))
            raise ValueError(
                f"{path}, line {number} has no text in text_field={text_field!r}: "
                f"the fields with text are: {texts or 'none'}"
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{path}, line {number} has half of a surrogate pair: repair it or leave the line out"
            ) from None
        yield text


class RowGroup(NamedTuple):
    """A row group of a Parquet file, readable on its own. `bytes` is the text's size, to the nearest percent."""

    path: Path
    number: int
    documents: int
    bytes: int


def row_groups(path: Path, text_field: str) -> list[RowGroup]:
    """Return the row groups from the file's footer, without reading text. Raises ValueError as `read` does."""
    with _parquet_file(path, text_field) as file:
        leaves = [file.schema.column(i).path for i in range(len(file.schema))]  # a nested column has several
        place = leaves.index(text_field)
        groups = [file.metadata.row_group(index) for index in range(file.num_row_groups)]
        return [
            RowGroup(path, index, group.num_rows, group.column(place).total_uncompressed_size)
            for index, group in enumerate(groups)
        ]


def footer(path: Path) -> bytes:
    """Return the footer of a Parquet file, which has all offsets and sizes and so identifies the contents."""
    with path.open("rb") as file:
        file.seek(-8, os.SEEK_END)
        length = int.from_bytes(file.read(4), "little")
        file.seek(-8 - length, os.SEEK_END)
        return file.read(length)


def read_row_group(group: RowGroup, text_field: str) -> Iterator[str]:
    """Yield the documents of a row group. Raises ValueError as `read` does."""
    return _parquet(group.path, text_field, [group.number])


def _parquet(path: Path, text_field: str, groups: Sequence[int] | None = None) -> Iterator[str]:
    with _parquet_file(path, text_field) as file:
        chosen = range(file.num_row_groups) if groups is None else groups
        row = sum(file.metadata.row_group(index).num_rows for index in range(chosen[0] if chosen else 0))
        for batch in file.iter_batches(_PARQUET_ROWS, row_groups=list(chosen), columns=[text_field]):
            for value in batch.column(0):
                yield _text(path, row, value)
                row += 1


@contextmanager
def _parquet_file(path: Path, text_field: str) -> Iterator[pyarrow.parquet.ParquetFile]:
    """Yield the open file. Raises ValueError if it lacks the column, or is found damaged while it is read."""
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = file.schema_arrow
            if text_field not in columns.names:
                raise ValueError(
                    f"{path} has no column text_field={text_field!r}: its columns are: {', '.join(columns.names)}"
                )
            if columns.names.count(text_field) > 1:
                raise ValueError(f"{path} has several columns text_field={text_field!r}: write it again with one")
            if columns.field(text_field).type not in _STRINGS:
                raise ValueError(
                    f"{path}, column text_field={text_field!r} holds {columns.field(text_field).type}: "
                    "name a column of strings"
                )
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        # Arrow reports damage as an OSError too, but without an errno.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is damaged or no Parquet file ({reason}): download or write it again") from None


_STRINGS = (pyarrow.string(), pyarrow.large_string())


def _text(path: Path, row: int, value: pyarrow.Scalar) -> str:
    try:
        text = value.as_py()
    except UnicodeDecodeError:
        raise ValueError(f"{path}, row {row} is not UTF-8: write the file again with strings that are") from None
    if text is None:
        raise ValueError(f"{path}, row {row} is null: leave such rows out")
    assert isinstance(text, str)
    return text

"""A corpus: documents of text in two splits, from the embedded standard library or from files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from . import embedded, files

EMBEDDED = "embedded"

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")

Reader = Callable[[], Iterator[embedded.Document]]


@dataclass(frozen=True)
class DataConfig:
    """What to read: `source` is "embedded", or a .txt, .jsonl or .parquet file, or a folder of such.

    `text_field` names the text in .jsonl and .parquet. `validation_fraction` is the share of documents held out of
    sources that have no validation split of their own, as a folder of Parquet shards and the embedded corpus have.
    """

    source: str = EMBEDDED
    text_field: str = "text"
    validation_fraction: float = 0.05

    def __post_init__(self) -> None:
        if not self.source:
            raise ValueError('source="" names nothing: give "embedded", or a file or folder')
        if not self.text_field:
            raise ValueError('text_field="" names nothing: give the field or column that holds the text')
        if not 0 < self.validation_fraction < 1:
            raise ValueError(
                f"validation_fraction={self.validation_fraction} is not between 0 and 1: give a share such as 0.05"
            )


class Size(NamedTuple):
    documents: int
    bytes: int


@dataclass(frozen=True)
class Corpus:
    """`hash` is the sha256, in hex, of the names and contents of all documents and of their split."""

    name: str
    hash: str
    sizes: Mapping[Split, Size]
    readers: Mapping[Split, Reader] = field(repr=False)

    def documents(self, split: Split) -> Iterator[str]:
        """Read the texts of one split, in a fixed order."""
        return (text for _, text in self.readers[split]())

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of both splits."""
        return sum(size.bytes for size in self.sizes.values())

    def describe(self) -> str:
        """One line for the reader of a log."""
        train, validation = (self.sizes[split] for split in SPLITS)
        return (
            f"{self.name}: {train.documents} documents, {train.bytes / 1e6:.2f} MB for training; "
            f"{validation.documents} documents, {validation.bytes / 1e6:.2f} MB for validation"
        )


def open_source(source: str, text_field: str = "text", validation_fraction: float = 0.05) -> Corpus:
    """Read the source once from end to end, so that whatever is wrong with it shows now. See `DataConfig`.

    Raises ValueError naming the path and the remedy where something is missing, empty, damaged or not UTF-8.
    """
    config = DataConfig(source, text_field, validation_fraction)
    if config.source == EMBEDDED:
        train, validation = embedded.documents()
        return make_corpus(
            config.source,
            {"train": lambda: iter(train), "validation": lambda: iter(validation)},
            "this Python comes without the source of its standard library, so name a file or folder of text",
        )
    path = Path(config.source).expanduser()
    paths = files.find(path)
    if len(paths) > 1 and paths[0].suffix.lower() == ".parquet":
        return make_corpus(
            config.source,
            {
                "train": lambda: _documents(path, paths[:-1], config.text_field),
                "validation": lambda: _documents(path, paths[-1:], config.text_field),
            },
            "of several Parquet files the last is for validation, so put documents into it and into the others",
        )
    # At least one document is for validation, however few there are.
    smallest = min((_hash_share(text) for _, text in _documents(path, paths, config.text_field)), default=0.0)
    bound = max(config.validation_fraction, smallest)

    def half(validation: bool) -> Iterator[embedded.Document]:
        documents = _documents(path, paths, config.text_field)
        return (document for document in documents if (_hash_share(document[1]) <= bound) == validation)

    return make_corpus(
        config.source,
        {"train": lambda: half(False), "validation": lambda: half(True)},
        "give more documents, or another validation_fraction",
    )


def absolute(source: str) -> str:
    """The same source, whatever the working folder."""
    return source if source == EMBEDDED else str(Path(source).expanduser().resolve())


def _documents(root: Path, paths: list[Path], text_field: str) -> Iterator[embedded.Document]:
    """Named by their path below `root` and their place in the file; a text file that is alone is cut into several."""
    for path in paths:
        alone = path.suffix.lower() == ".txt" and len(paths) == 1
        name = path.name if path == root else path.relative_to(root).as_posix()
        texts = files.sections(path) if alone else files.read(path, text_field)
        yield from ((f"{name}:{place}", text) for place, text in enumerate(texts) if text.strip())


def _hash_share(text: str) -> float:
    """A number in [0, 1) that equal texts share, so that no text is on both sides of the split."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7]) / 2**56


def make_corpus(name: str, readers: Mapping[Split, Reader], remedy: str) -> Corpus:
    """Reads all documents once. Raises ValueError that ends with the remedy where a split has none."""
    digest = hashlib.sha256()
    sizes: dict[Split, Size] = {}
    for split, read in readers.items():
        documents = total = 0
        for document, text in read():
            data = text.encode()
            digest.update(f"{split} {document} {len(data)}\n".encode())
            digest.update(data)
            documents += 1
            total += len(data)
        sizes[split] = Size(documents, total)
    corpus = Corpus(name, digest.hexdigest(), sizes, readers)
    if corpus.bytes == 0:
        raise ValueError(f"{name} has no documents: {remedy}")
    for split, size in sizes.items():
        if size.documents == 0:
            raise ValueError(f"{name} has no documents left for {split}: {remedy}")
    return corpus

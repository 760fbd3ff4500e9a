"""Opens corpora: documents in two splits, or held-out ones alone, from the embedded standard library or from files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from ..files import expand
from ..option import Count, option, require_valid
from . import embedded, files
from .public import FINEWEB_EDU, downloaded_fineweb_edu
from .tokenizer import Tokenizer
from .tokens import MANIFEST, TOKENIZER, Parts, TextParts, open_tokens

EMBEDDED = "embedded"
CODE = "code"
"""The name of the source that contains only the code of the embedded corpus. It can be evaluated on, not trained on."""
# GSM8K and HumanEval are recognised by their field names. The value separates the two fields.
QUESTION_SETS = {("question", "answer"): "\n", ("prompt", "canonical_solution"): ""}
VALIDATION_SHARE = 0.05

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
Reader = Callable[[], Iterator[embedded.Document]]


@dataclass(frozen=True)
class DataConfig:
    """Data options. The embedded corpus, folders of Parquet shards, and folders with files named validation or test
    have a validation split. For any other text, a fraction VALIDATION_SHARE of the documents is held out.
    """

    source: str = option(
        EMBEDDED,
        "Text to train on: embedded (Python's standard library), fineweb-edu (after et data has downloaded it), or the "
        "path of a .txt or .jsonl file (optionally .gz or .zst), a .parquet file, a folder of files of one of these "
        "kinds, or a folder of tokens.",
    )
    text_field: str = option("text", "Name of the field or column that contains the text in .jsonl and .parquet files.")
    train_shards: Count | None = option(None, "Number of fineweb-edu or Parquet shards to train on. Defaults to all.")

    def __post_init__(self) -> None:
        require_valid(DataConfig, vars(self))


class Size(NamedTuple):
    documents: int
    bytes: int


@dataclass(frozen=True)
class Corpus:
    """Documents in two splits. `hash` is the sha256, in hex, of the names, contents and splits of all documents.

    Shards are read on demand, so `hash` covers only their names and footers, and `sizes` are accurate to about one
    percent. `parts` returns the parts of a split, tokenized on demand with a given tokenizer, or is None if the corpus
    fits into memory. `tokenizer` is the tokenizer stored with the text; a `tokenized` corpus works with no other one.
    `train_shards` is the number of training shards. `notes` mention what a user might not expect.
    """

    name: str
    hash: str
    sizes: Mapping[Split, Size]
    texts: Mapping[Split, Callable[[], Iterator[str]]] = field(repr=False)
    parts: Callable[[Split, Tokenizer], Parts] | None = field(default=None, repr=False)
    tokenizer: Tokenizer | None = field(default=None, repr=False)
    tokenized: bool = False
    train_shards: int | None = None
    notes: Sequence[str] = ()

    def documents(self, split: Split) -> Iterator[str]:
        """Return an iterator over the texts of one split, in a fixed order."""
        return self.texts[split]()

    def beginning(self, characters: int, progress: Callable[[int, int], None] | None = None) -> Iterator[str]:
        """Yield the first `characters` of the training split, text by text. `progress` gets the number read and the
        total.
        """
        read, total = 0, min(characters, self.sizes["train"].bytes)
        for text in self.documents("train"):
            yield text[: characters - read]
            read += len(text)
            if progress is not None:
                progress(min(read, total), total)
            if read >= characters:
                return

    @property
    def bytes(self) -> int:
        """The number of UTF-8 bytes in both splits."""
        return sum(size.bytes for size in self.sizes.values())

    def describe(self) -> str:
        """Return a one-line description for logs."""
        sizes = {"training": self.sizes["train"], "validation": self.sizes["validation"]}
        facts = [f"{size.documents} documents, {size.bytes / 1e6:.2f} MB for {use}" for use, size in sizes.items()]
        return f"{self.name}: {'; '.join([*facts, *self.notes])}"


def open_source(source: str, text_field: str = "text", train_shards: int | None = None) -> Corpus:
    """Open a corpus. See `DataConfig` for the arguments.

    Sources other than shards are read completely, so that errors show up early. Raises ValueError, naming the path and
    the remedy, if anything is missing, empty, damaged or not UTF-8.
    """
    config = DataConfig(source, text_field, train_shards)
    if source == FINEWEB_EDU:
        return _open_shards(config, downloaded_fineweb_edu())
    path = expand(source)
    paths = [] if source == EMBEDDED or (path / MANIFEST).is_file() else files.find(path)
    if len(paths) > 1 and files.kind(paths[0]) == ".parquet":
        return _open_shards(config, paths)
    if train_shards is not None:
        raise ValueError(f"train_shards={train_shards}: {source} has no Parquet shards; omit the option")
    if source == EMBEDDED:
        train, validation = embedded.documents()
        remedy = "this Python comes without the source of its standard library, so use a file or folder of text"
        return make_corpus(source, {"train": lambda: iter(train), "validation": lambda: iter(validation)}, remedy)
    if not paths:
        return _open_tokens(source, path)
    by_name, notes = _split_by_name(path, paths)
    smallest, nulls = 1.0, 0
    for _, text in _rows(path, paths, text_field):
        nulls += text is None
        if text and text.strip():
            smallest = min(smallest, _hash_share(text))
    if smallest == 1:
        raise ValueError(f"{source} contains no documents; add some text, or use another file or folder")
    bound = max(VALIDATION_SHARE, smallest)  # at least one document goes to validation

    def read(split: Split) -> Iterator[embedded.Document]:
        for name, text in _rows(path, by_name.get(split, paths), text_field):
            if text and text.strip() and (by_name or (_hash_share(text) <= bound) == (split == "validation")):
                yield name, text

    remedy = "add more distinct documents, as files, .jsonl lines, .parquet rows or one .txt file of more than 16 KiB"
    readers = {split: partial(read, split) for split in SPLITS}
    return make_corpus(source, readers, remedy, [*notes, *_unread(path, paths, nulls)])


def open_held_out(source: str, text_field: str = "text") -> Corpus:
    """Return a corpus whose validation split is the source's held-out text. It may have no training split.

    source: as in `DataConfig`, or "code" for only the source code in the embedded corpus. A source without a validation
    split holds out its files named test or validation, or all files if none has such a name. A line of GSM8K or
    HumanEval becomes the question followed by the answer. Raises ValueError as `open_source` does.
    """
    remedy = "there is nothing to evaluate on, so choose another source"
    if source == CODE:
        _, held_out = embedded.documents()
        code = [(name, text) for name, text in held_out if name.endswith(".py")]
        return make_corpus(source, {"validation": lambda: iter(code)}, remedy)
    path = expand(source)
    if source in (EMBEDDED, FINEWEB_EDU) or (path / MANIFEST).is_file():
        return open_source(source, text_field)
    paths = files.find(path)
    named = files.held_out(path, paths)
    if len(paths) > 1 and not named and files.kind(paths[0]) == ".parquet":
        return open_source(source, text_field)
    return make_corpus(source, {"validation": lambda: _held_out(named or paths, text_field)}, remedy)


def _held_out(paths: Sequence[Path], text_field: str) -> Iterator[embedded.Document]:
    texts = (text for path in paths for text in _answered(path, text_field) if text and text.strip())
    return ((str(place), text) for place, text in enumerate(texts))


def _answered(path: Path, text_field: str) -> Iterator[str | None]:
    """Yield the documents of a file, where those of a question set are its questions with their answers."""
    if files.kind(path) == ".jsonl":
        fields = _fields(next(files.lines(path), ""))
        for question_set, between in QUESTION_SETS.items():
            if text_field not in fields and fields.issuperset(question_set):
                pairs = zip(*(files.read(path, field) for field in question_set), strict=True)
                return (None if None in pair else between.join(map(str, pair)) for pair in pairs)
    return files.read(path, text_field)


def _fields(line: str) -> set[str]:
    """Return the field names of a JSON object, or nothing for any other line, which `files.read` rejects."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return set()
    return set(record) if isinstance(record, dict) else set()


def _split_by_name(root: Path, paths: Sequence[Path]) -> tuple[dict[Split, list[Path]], list[str]]:
    """Return the files of each split if some, but not all, are named test or validation, and notes about the choice.

    Files named test are used for validation only if no file is named validation.
    """
    held_out = files.held_out(root, paths)
    if not held_out:
        return {}, []
    if len(held_out) == len(paths):
        return {}, ["trains on text that is named test or validation"]
    validation = files.held_out(root, paths, files.VALIDATION) or held_out
    names = ", ".join(path.relative_to(root).as_posix() for path in held_out[:4]) + ", …" * (len(held_out) > 4)
    train = sorted(set(paths) - set(held_out))
    return {"train": train, "validation": validation}, [f"does not train on {names}"]


def _unread(root: Path, paths: Sequence[Path], nulls: int) -> list[str]:
    """Return notes about rows without text and about files of the kinds that are not read."""
    others = [*map(files.kind, files.visible(root))] if root.is_dir() else []
    kinds = [kind for kind in files.SUFFIXES if kind in others and kind != files.kind(paths[0])]
    unread = [
        f"reads {files.kind(paths[0])} files only, which leaves out {others.count(kind)} {kind}" for kind in kinds
    ]
    return unread + [f"{nulls} rows without text are left out"] * (nulls > 0)


def _open_shards(config: DataConfig, paths: Sequence[Path]) -> Corpus:
    """Return a corpus of shards. The last shard is for validation unless file names determine the splits."""
    root = expand(config.source) if config.source != FINEWEB_EDU else paths[0].parent
    by_name, notes = _split_by_name(root, paths)
    by_name = by_name or {"train": list(paths[:-1]), "validation": list(paths[-1:])}
    there = len(by_name["train"])
    if (number := config.train_shards or there) > there:
        raise ValueError(f"train_shards={number}: {config.source} has {there} training shards; use at most {there}")
    by_name["train"] = by_name["train"][:number]
    shards = {split: files.open_shards(by_name[split], config.text_field) for split in SPLITS}
    # Shards may be in a subfolder, and the tokenizer in either folder.
    beside = next((folder / TOKENIZER for folder in (root, paths[0].parent) if (folder / TOKENIZER).is_file()), None)
    return Corpus(
        config.source,
        hashlib.sha256("".join(shards[split].hash for split in SPLITS).encode()).hexdigest(),
        {s: Size(sum(g.documents for g in x.groups), sum(g.bytes for g in x.groups)) for s, x in shards.items()},
        {split: found.texts for split, found in shards.items()},
        lambda split, tokenizer: TextParts(shards[split], tokenizer),
        None if beside is None else Tokenizer.load(beside),
        train_shards=number,
        notes=[*notes, *_unread(root, paths, sum(group.nulls for found in shards.values() for group in found.groups))],
    )


def _open_tokens(name: str, folder: Path) -> Corpus:
    manifest, ours, parts = open_tokens(folder)

    def with_tokenizer(split: Split, tokenizer: Tokenizer) -> Parts:
        if tokenizer.hash != ours.hash:
            raise ValueError(f"{name} was tokenized with a different tokenizer than this run's; pass the text itself")
        return parts[split]

    return Corpus(
        name,
        manifest["corpus"],
        {split: Size(*manifest["sizes"][split]) for split in SPLITS},
        {split: partial(parts[split].texts, ours) for split in SPLITS},
        with_tokenizer,
        ours,
        tokenized=True,
    )


def absolute(source: str) -> str:
    """Return the source with an absolute path, independent of the working directory."""
    return source if source in (EMBEDDED, FINEWEB_EDU) else str(expand(source).resolve())


def _rows(root: Path, paths: Sequence[Path], text_field: str) -> Iterator[tuple[str, str | None]]:
    """Yield texts, each named by its path below `root` and an index. A lone .txt file is split into sections."""
    for path in paths:
        name = path.name if path == root else path.relative_to(root).as_posix()
        alone = files.kind(path) == ".txt" and len(paths) == 1
        texts: Iterator[str | None] = files.sections(path) if alone else files.read(path, text_field)
        yield from ((f"{name}:{place}", text) for place, text in enumerate(texts))


def _hash_share(text: str) -> float:
    """Return a number in [0, 1) that depends only on the text, so that equal texts are in the same split."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7]) / 2**56


def _texts(read: Reader) -> Iterator[str]:
    return (text for _, text in read())


def make_corpus(name: str, readers: Mapping[Split, Reader], remedy: str, notes: Sequence[str] = ()) -> Corpus:
    """Build a corpus after reading all documents once. Raises ValueError with the remedy if a split is empty."""
    digest = hashlib.sha256()
    sizes: dict[Split, Size] = {}
    for split, read in readers.items():
        documents = total = 0
        for document, text in read():
            data = text.encode()
            digest.update(f"{split} {document} {len(data)}\n".encode(errors="surrogateescape"))
            digest.update(data)
            documents += 1
            total += len(data)
        sizes[split] = Size(documents, total)
    texts = {split: partial(_texts, read) for split, read in readers.items()}
    corpus = Corpus(name, digest.hexdigest(), sizes, texts, notes=notes)
    if corpus.bytes == 0:
        raise ValueError(f"{name} contains no documents; {remedy}")
    for split, size in sizes.items():
        if size.documents == 0:
            raise ValueError(f"{name} has no documents left for {split}; {remedy}")
    return corpus

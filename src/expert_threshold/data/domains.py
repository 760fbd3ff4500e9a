"""Opens text for evaluation: the held-out part of any source, or one of two question sets as plain text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..files import expand
from . import embedded, files
from .public import FINEWEB_EDU
from .sources import EMBEDDED, Corpus, make_corpus, open_source
from .token_files import MANIFEST

CODE = "code"
"""The name of the source that contains only the code of the embedded corpus."""

# GSM8K and HumanEval are recognised by their field names. The value separates the two fields.
QUESTION_SETS = {("question", "answer"): "\n", ("prompt", "canonical_solution"): ""}


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
    return make_corpus(source, {"validation": lambda: _documents(named or paths, text_field)}, remedy)


def _documents(paths: Sequence[Path], text_field: str) -> Iterator[embedded.Document]:
    texts = (text for path in paths for text in _read(path, text_field) if text and text.strip())
    return ((str(place), text) for place, text in enumerate(texts))


def _read(path: Path, text_field: str) -> Iterator[str | None]:
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
    except ValueError:
        return set()
    return set(record) if isinstance(record, dict) else set()

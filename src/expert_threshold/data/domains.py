"""Text to measure a model on: what any source holds out, and two sets of questions as plain text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import embedded, files
from .public import FINEWEB_EDU
from .sources import EMBEDDED, Corpus, make_corpus, open_source
from .token_files import MANIFEST

CODE = "code"
"""The embedded corpus without its prose."""

HELD_OUT = ("test", "validation")
"""Names of files that are not for training: test.jsonl, validation-00000-of-00001.parquet."""

# Sets of questions are known by the fields of their lines: GSM8K and HumanEval. What stands between the two.
QUESTION_SETS = {("question", "answer"): "\n", ("prompt", "canonical_solution"): ""}


def open_held_out(source: str, text_field: str = "text") -> Corpus:
    """A corpus whose validation split is what the source holds out; it may have no other.

    source: as in `DataConfig`, or "code", the source files alone of the embedded corpus. A source without a validation
    split of its own holds out its files named test or validation, or if there are none, everything. A line of GSM8K or
    HumanEval is question and answer, one below the other. Raises ValueError as `open_source` does.
    """
    remedy = "there is nothing to measure a model on, so name another source"
    if source == CODE:
        _, held_out = embedded.documents()
        code = [(name, text) for name, text in held_out if name.endswith(".py")]
        return make_corpus(source, {"validation": lambda: iter(code)}, remedy)
    path = Path(source).expanduser()
    if source in (EMBEDDED, FINEWEB_EDU) or (path / MANIFEST).is_file():
        return open_source(source, text_field)
    paths = files.find(path)
    named = [each for each in paths if each.stem.split("-")[0] in HELD_OUT]
    if len(paths) > 1 and not named and paths[0].suffix.lower() == ".parquet":
        return open_source(source, text_field)
    return make_corpus(source, {"validation": lambda: _documents(named or paths, text_field)}, remedy)


def _documents(paths: Sequence[Path], text_field: str) -> Iterator[embedded.Document]:
    texts = (text for path in paths for text in _read(path, text_field) if text.strip())
    return ((str(place), text) for place, text in enumerate(texts))


def _read(path: Path, text_field: str) -> Iterator[str]:
    if path.suffix.lower() == ".jsonl":
        with path.open("rb") as file:
            fields = _fields(file.readline())
        for question_set, between in QUESTION_SETS.items():
            if text_field not in fields and fields.issuperset(question_set):
                columns = (files.read(path, field) for field in question_set)
                return (question + between + answer for question, answer in zip(*columns, strict=True))
    return files.read(path, text_field)


def _fields(line: bytes) -> set[str]:
    """Of a JSON object; of anything else, which reading it will tell, none."""
    try:
        record = json.loads(line)
    except ValueError:
        return set()
    return set(record) if isinstance(record, dict) else set()

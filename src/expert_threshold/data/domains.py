"""Text to measure a model on: what any source holds out, and two sets of questions as plain text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import embedded, files
from .sources import EMBEDDED, Corpus, make_corpus

CODE = "code"
"""The embedded corpus without its prose."""

HELD_OUT = ("test", "validation")
"""Names of files that are not for training: test.jsonl, validation-00000-of-00001.parquet."""

# Sets of questions are known by the fields of their lines: GSM8K and HumanEval. What stands between the two.
QUESTION_SETS = {("question", "answer"): "\n", ("prompt", "canonical_solution"): ""}


def open_held_out(source: str, text_field: str = "text") -> Corpus:
    """A corpus of one split, validation: what the source holds out.

    source: "embedded", "code" (its source files alone), or a .txt, .jsonl or .parquet file or a folder of such. Held
    out are the embedded corpus's own split, files named test or validation, or the last of several Parquet files; where
    there are none of these, everything. A line of GSM8K or HumanEval is question and answer, one below the other.
    Raises ValueError as `open_source` does.
    """
    remedy = "there is nothing to measure a model on, so name another source"
    if source in (EMBEDDED, CODE):
        _, held_out = embedded.documents()
        wanted = [document for document in held_out if source == EMBEDDED or document[0].endswith(".py")]
        return make_corpus(source, {"validation": lambda: iter(wanted)}, remedy)
    paths = files.find(Path(source).expanduser())
    named = [path for path in paths if path.stem.split("-")[0] in HELD_OUT]
    if len(paths) > 1 and (named or paths[0].suffix.lower() == ".parquet"):
        paths = named or paths[-1:]
    return make_corpus(source, {"validation": lambda: _documents(paths, text_field)}, remedy)


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

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from cases import write_shards
from commands import write_lines
from expert_threshold.data import Corpus, embedded, files, open_held_out, open_source

PARAGRAPHS = [f"Paragraph {number}.\nIt ends here: größer.\n\n" for number in range(1500)]
TEXTS = [f"Document {number}: größer, weiter.\n" for number in range(200)]


def write_jsonl(path: Path, texts: Sequence[str | None], field: str = "text") -> None:
    write_lines(path, [{"id": 1, field: text} for text in texts])


def write_parquet(path: Path, texts: Sequence[str | None], field: str = "text") -> None:
    table = pyarrow.table({"id": list(range(len(texts))), field: pyarrow.array(texts, pyarrow.string())})
    pyarrow.parquet.write_table(table, path, row_group_size=64)


def write_txt_folder(path: Path, texts: Sequence[str]) -> None:
    path.mkdir()
    for number, text in enumerate(texts):
        (path / f"{number:03}.txt").write_text(text, encoding="utf-8", newline="")


@pytest.fixture(params=["jsonl", "parquet", "txt"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"data.{request.param}"
    {"jsonl": write_jsonl, "parquet": write_parquet, "txt": write_txt_folder}[request.param](path, TEXTS)
    return path


# The embedded corpus.


@pytest.fixture(scope="module")
def standard_library() -> Corpus:
    return open_source("embedded")


def test_the_embedded_corpus_has_code_and_prose_of_about_ten_megabytes(standard_library: Corpus) -> None:
    names = [name for split in embedded.documents() for name, _ in split]
    assert {"argparse.py", "argparse.py#docstrings", "json/decoder.py"} <= set(names)
    assert len(names) == len(set(names))
    assert 7e6 < standard_library.bytes < 14e6
    assert not [name for name in names if "/test" in name or "encodings" in name]


def test_the_embedded_validation_split_is_small_and_has_no_file_or_text_of_training(standard_library: Corpus) -> None:
    train, validation = map(dict, embedded.documents())
    assert not {name.split("#")[0] for name in train} & {name.split("#")[0] for name in validation}
    assert not set(train.values()) & set(validation.values())
    assert 0.5 * embedded.VALIDATION_BYTES < standard_library.sizes["validation"].bytes <= embedded.VALIDATION_BYTES
    assert max(map(len, validation.values())) <= embedded.VALIDATION_FILE_BYTES


def write_stdlib(root: Path) -> None:
    (root / "json" / "tests").mkdir(parents=True)
    (root / "pydoc_data").mkdir()
    (root / "json" / "__init__.py").write_text('"""All of it."""\n')
    (root / "json" / "tests" / "test_a.py").write_text("left = 'out'\n")
    (root / "queue.py").write_bytes(
        b'# -*- coding: latin-1 -*-\r\n# \xe4\r\nclass A:\r\n    "One."\r\n    def f(): "Two."\n'
    )
    (root / "bisect.py").write_text('a = "\\d"\n')
    (root / "heapq.py").write_text("")
    (root / "sched.py").write_text('a = "\\d"\n')
    (root / "other.py").write_text("not = in the list\n")
    (root / "pydoc_data" / "topics.py").write_text(
        "__all__ = 'topics'\ntopics = {'if': 'The \"if\" statement'\n '.', 'for': 'Loops.'}\n"
    )


def test_embedded_documents_are_sources_docstrings_and_topics(tmp_path: Path) -> None:
    """A stripped library, with a comment in Latin-1, an escape that the parser warns of, and one file twice."""
    write_stdlib(tmp_path)
    train, validation = embedded.documents(tmp_path)
    assert dict(train + validation) == {
        "bisect.py": 'a = "\\d"\n',
        "json/__init__.py": '"""All of it."""\n',
        "json/__init__.py#docstrings": "json\n\nAll of it.",
        "queue.py": '# -*- coding: latin-1 -*-\n# ä\nclass A:\n    "One."\n    def f(): "Two."\n',
        "queue.py#docstrings": "queue.A\n\nOne.\n\n\nqueue.A.f\n\nTwo.",
        "pydoc_data/topics.py#if": 'The "if" statement.',
        "pydoc_data/topics.py#for": "Loops.",
    }


def test_a_python_without_sources_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(embedded, "documents", embedded.documents.__wrapped__)  # type: ignore[attr-defined]
    assert_refused("embedded contains no documents; this Python comes without the source", "embedded")


# Files.


def documents_of(corpus: Corpus) -> list[str]:
    return sorted([*corpus.documents("train"), *corpus.documents("validation")])


def test_every_document_is_in_one_split_and_about_a_twentieth_in_validation(source: Path) -> None:
    corpus = open_source(str(source))
    train, validation = list(corpus.documents("train")), list(corpus.documents("validation"))
    assert documents_of(corpus) == sorted(TEXTS)
    assert 1 <= len(validation) <= 25
    assert corpus.sizes["validation"] == (len(validation), sum(len(text.encode()) for text in validation))
    assert corpus.bytes == sum(len(text.encode()) for text in TEXTS)
    assert list(corpus.documents("train")) == train


def test_the_hash_follows_names_contents_and_the_split_but_not_the_place(source: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "other.jsonl", TEXTS)
    other = open_source(str(tmp_path / "other.jsonl")).hash
    write_jsonl(tmp_path / "other.jsonl", [*TEXTS[:-1], TEXTS[-1][:-1] + "."])
    assert open_source(str(tmp_path / "other.jsonl")).hash != other
    before = open_source(str(source)).hash
    assert open_source(str(source)).hash == before
    (tmp_path / "elsewhere").mkdir()
    moved = source.rename(tmp_path / "elsewhere" / source.name)
    assert open_source(str(moved)).hash == before
    renamed = moved.rename(moved.with_stem("renamed")) if moved.is_file() else moved
    if renamed is moved:
        (moved / "000.txt").rename(moved / "0.txt")
    assert open_source(str(renamed)).hash != before


def test_equal_documents_are_on_one_side_of_the_split_and_two_are_enough(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, TEXTS * 3)
    corpus = open_source(str(path))
    assert not set(corpus.documents("train")) & set(corpus.documents("validation"))
    write_jsonl(path, ["one", "two"])
    corpus = open_source(str(path))
    assert [size.documents for size in corpus.sizes.values()] == [1, 1]


def test_one_text_file_is_cut_into_documents_at_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(PARAGRAPHS), encoding="utf-8", newline="")
    sections = list(files.sections(path))
    assert "".join(sections) == "".join(PARAGRAPHS)
    assert len(sections) > 5
    assert all(section.endswith("\n\n") and len(section) < 9000 for section in sections)
    assert documents_of(open_source(str(path))) == sorted(sections)


def test_the_last_of_several_parquet_files_is_for_validation(tmp_path: Path) -> None:
    for shard in range(3):
        write_parquet(tmp_path / f"shard_{shard}.parquet", TEXTS[shard * 50 : shard * 50 + 50])
    (tmp_path / "SOURCE.txt").write_text("a note, not data")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "z.parquet").write_text("hidden")
    corpus = open_source(str(tmp_path))
    assert list(corpus.documents("train")) == TEXTS[:100]
    assert list(corpus.documents("validation")) == TEXTS[100:150]
    sizes = "100 documents, 0.00 MB for training; 50 documents, 0.00 MB for validation"
    assert corpus.describe() == f"{tmp_path}: {sizes}; reads .parquet files only, which leaves out 1 .txt"


def test_text_field_is_configurable_and_blank_documents_and_byte_order_marks_are_dropped(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [*TEXTS, "", " \n"], field="body")
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf\n" + (tmp_path / "a.jsonl").read_bytes())
    write_parquet(tmp_path / "a.parquet", [*TEXTS, "", " \n"], field="body")
    for name in ("a.jsonl", "a.parquet"):
        assert documents_of(open_source(str(tmp_path / name), text_field="body")) == sorted(TEXTS)


TEXT_KINDS = ["large_string", "string_view", "binary", "large_binary", "binary_view", "dictionary"]


@pytest.mark.parametrize("kind", TEXT_KINDS)
def test_a_column_of_any_kind_of_text_is_read(kind: str, tmp_path: Path) -> None:
    texts = pyarrow.array(TEXTS)
    column = texts.dictionary_encode() if kind == "dictionary" else texts.cast(getattr(pyarrow, kind)())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert documents_of(open_source(str(tmp_path))) == sorted(TEXTS)


def test_a_column_named_like_a_part_of_text_is_another_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions of Arrow read `text.lang`, too, where `text` is asked for."""
    read = pyarrow.parquet.ParquetFile.iter_batches
    monkeypatch.setattr("pyarrow.parquet.ParquetFile.iter_batches", lambda *a, columns, **options: read(*a, **options))
    table = pyarrow.table({"text.lang": ["de"] * len(TEXTS), "text": TEXTS})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert documents_of(open_source(str(tmp_path))) == sorted(TEXTS)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "shards"])
def test_rows_without_text_are_left_out_and_counted(kind: str, tmp_path: Path) -> None:
    write = write_jsonl if kind == "jsonl" else write_parquet
    write(tmp_path / f"a.{write.__name__.removeprefix('write_')}", [None, *TEXTS, None])
    if kind == "shards":
        write_parquet(tmp_path / "b.parquet", ["of the other shard", None])
    corpus = open_source(str(tmp_path))
    assert documents_of(corpus) == sorted([*TEXTS, *["of the other shard"] * (kind == "shards")])
    assert sum(size.documents for size in corpus.sizes.values()) == len(documents_of(corpus))
    assert corpus.describe().endswith(f"; {3 if kind == 'shards' else 2} rows without text are left out")


@pytest.mark.parametrize(("packed", "codec"), [(".gz", "gzip"), (".zst", "zstd")])
@pytest.mark.parametrize("kind", [".jsonl", ".txt"])
def test_compressed_text_is_read_as_it_was(kind: str, packed: str, codec: str, tmp_path: Path) -> None:
    plain = tmp_path / f"a{kind}"
    write_jsonl(plain, TEXTS * 9)
    before = documents_of(open_source(str(plain)))
    path = plain.with_name(plain.name + packed)
    data = bytes(pyarrow.Codec(codec).compress(plain.read_bytes()))
    path.write_bytes(data)
    plain.unlink()
    assert documents_of(open_source(str(tmp_path))) == before
    for damaged in (data[: len(data) // 2], b"something else"):
        path.write_bytes(damaged)
        assert_refused(f"{path} is damaged or not a {codec} file (", path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_files_named_test_or_validation_are_not_trained_on(kind: str, tmp_path: Path) -> None:
    write = {"jsonl": write_jsonl, "parquet": write_parquet}[kind]
    (tmp_path / "test").mkdir()
    write(tmp_path / f"train-0.{kind}", TEXTS[:50])
    write(tmp_path / f"train-1.{kind}", TEXTS[50:100])
    write(tmp_path / "test" / f"0.{kind}", TEXTS[100:150])
    corpus = open_source(str(tmp_path))
    assert list(corpus.documents("train")) == TEXTS[:100]
    assert list(corpus.documents("validation")) == TEXTS[100:150]
    assert corpus.describe().endswith(f"; does not train on test/0.{kind}")
    (tmp_path / "valid").mkdir()
    write(tmp_path / "valid" / f"0.{kind}", TEXTS[150:])
    corpus = open_source(str(tmp_path))
    assert list(corpus.documents("train")) == TEXTS[:100]
    assert list(corpus.documents("validation")) == TEXTS[150:]
    assert corpus.describe().endswith(f"; does not train on test/0.{kind}, valid/0.{kind}")
    asked_for = open_source(str((tmp_path / "valid" / f"0.{kind}").rename(tmp_path / f"dev.{kind}")))
    assert asked_for.describe().endswith("; trains on text that is named test or validation")


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("A line.\r\n" * 10_000, "\r\n"),
        ("".join(PARAGRAPHS).replace("\n", "\r"), "\r\r"),
        ("größer, weiter " * 9000, " "),
        ("größer" * 9000, ""),
    ],
    ids=["no blank line", "Macintosh", "one line", "no blanks"],
)
def test_a_text_without_blank_lines_is_cut_at_line_ends_or_blanks(text: str, end: str, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8", newline="")
    sections = list(files.sections(path))
    assert "".join(sections) == text
    assert all(section.endswith(end) and len(section) < 17_000 for section in sections)
    assert len(open_source(str(path)).sizes) == 2


def test_links_are_followed_and_none_is_left_out_in_silence(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    write_jsonl(elsewhere / "a.jsonl", TEXTS)
    (folder / "linked").symlink_to(elsewhere)
    (elsewhere / "circle").symlink_to(folder)
    assert documents_of(open_source(str(folder))) == sorted(TEXTS)
    (folder / "lost.jsonl").symlink_to(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"lost\.jsonl"):
        open_source(str(folder))


def test_a_folder_that_cannot_be_read_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "closed").mkdir()
    scan = os.scandir

    def refuse(path: str) -> Any:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="closed"):
        open_source(str(tmp_path))


@pytest.mark.parametrize("shards", [1, 2])
def test_the_hash_of_parquet_depends_on_the_column(shards: int, tmp_path: Path) -> None:
    """The measurements of one column were taken for the other's."""
    for shard in range(shards):
        table = pyarrow.table({"head": TEXTS, "body": TEXTS[::-1]})
        pyarrow.parquet.write_table(table, tmp_path / f"{shard}.parquet")
    assert open_source(str(tmp_path), "head").hash != open_source(str(tmp_path), "body").hash


# Errors, which name the path and the remedy.


def assert_refused(start: str, source: Path | str, **options: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(start)}"):
        open_source(str(source), **options)


def test_what_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    assert_refused(f"{tmp_path}/none.txt does not exist; use", tmp_path / "none.txt")
    (tmp_path / "a.csv").write_text("a,b")
    assert_refused(f"{tmp_path} contains no .txt, .jsonl or .parquet file; add", tmp_path)
    assert_refused(f"{tmp_path}/a.csv is not a .txt, .jsonl or .parquet file; convert", tmp_path / "a.csv")
    write_parquet(tmp_path / "empty.parquet", [])
    for name in ("empty.txt", "empty.jsonl", "empty.parquet"):
        path = tmp_path / name
        if not path.exists():
            path.write_text(" \n")
        assert_refused(f"{path} contains no documents; add some text", path)


def test_a_split_without_documents_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, ["only one"] * 3)
    assert_refused(f"{path} has no documents left for train; add more distinct documents", path)
    write_parquet(tmp_path / "a.parquet", TEXTS)
    write_parquet(tmp_path / "b.parquet", [])
    assert_refused(f"{tmp_path}/b.parquet contains no documents; add some, or remove the file", tmp_path)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_text_that_is_not_utf8_is_refused_with_its_offset(name: str, tmp_path: Path) -> None:
    data = b'{"text": "fine"}\n{"text": "caf\xe9"}\n'
    (tmp_path / name).write_bytes(data)
    offset = data.index(b"\xe9")
    assert_refused(f"{tmp_path / name} is not valid UTF-8 at byte {offset}; convert", tmp_path / name)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": ', "is not valid JSON (Expecting value); each"),
        ("[" * 100_000, "is not valid JSON (maximum recursion depth exceeded"),
        ('{"text": ' + "1" * 5000 + "}", "is not valid JSON (Exceeds the limit (4300 digits)"),
        ("[1]", "is not a JSON object; each"),
        ('{"id": 1, "a": "x", "b": "y"}', "has no text in text_field='text'; the fields with text are a, b"),
        ('{"text": 5}', "has no text in text_field='text'; the fields with text are none"),
        ('{"text": "\\ud83d"}', "contains an unpaired surrogate; repair"),
    ],
)
def test_a_wrong_jsonl_line_is_refused_with_its_number(line: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "fine"}}\n\n{line}\n', encoding="utf-8")
    assert_refused(f"{path}, line 3 {problem}", path)


def test_a_parquet_file_without_the_column_is_refused_with_the_columns_it_has(tmp_path: Path) -> None:
    path = tmp_path / "b.parquet"
    write_parquet(path, TEXTS, field="body")
    assert_refused(f"{path} has no column text_field='text'; its columns are id, body", path)
    assert_refused(f"{path}, column text_field='id' contains int64; choose", path, text_field="id")
    write_parquet(tmp_path / "a.parquet", TEXTS)
    assert_refused(f"{path} has no column text_field='text'", tmp_path)


def test_a_damaged_parquet_file_is_refused_alone_and_among_others(tmp_path: Path) -> None:
    path = tmp_path / "shards" / "a.parquet"
    path.parent.mkdir()
    write_parquet(path, TEXTS)
    data = path.read_bytes()
    write_parquet(path.with_name("b.parquet"), TEXTS)
    for content in (data[: len(data) // 2], b"", b"not a Parquet file at all"):
        path.write_bytes(content)
        for source in (path, path.parent):
            assert_refused(f"{path} is damaged or not a Parquet file (", source)
    path.write_bytes(data[:8] + bytes(len(data) // 2) + data[8 + len(data) // 2 :])  # pages of zeros
    assert_refused(f"{path} is damaged or not a Parquet file (", path)


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.binary()], ids=str)
def test_parquet_rows_that_are_not_utf8_are_refused(kind: pyarrow.DataType, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    array = pyarrow.array([b"fine", None, b"caf\xe9"], pyarrow.binary()).view(kind)
    pyarrow.parquet.write_table(pyarrow.table({"text": array}), path)
    assert_refused(f"{path}, row 2 is not valid UTF-8; rewrite", path)


def test_an_error_of_the_system_stays_one(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(source))

    monkeypatch.setattr("pyarrow.parquet.ParquetFile", refuse)
    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(PermissionError):
        open_source(str(source))


# Held-out documents, on which models are measured.


def held_out(source: object, **options: str) -> list[str]:
    return list(open_held_out(str(source), **options).documents("validation"))


def test_embedded_holds_out_its_validation_split_and_code_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    split = [("a.py", "x = 1"), ("a.py#docstrings", "prose"), ("pydoc_data/topics.py#if", "more prose")]
    monkeypatch.setattr("expert_threshold.data.embedded.documents", lambda: ([("b.py", "y = 2")], split))
    assert held_out("embedded") == ["x = 1", "prose", "more prose"]
    assert held_out("code") == ["x = 1"]


def test_of_shards_it_is_the_last_and_of_one_file_everything(tmp_path: Path) -> None:
    write_shards(tmp_path, ["text 0", "text 1", "text 2"])
    assert held_out(tmp_path) == ["text 2"] == list(open_source(str(tmp_path)).documents("validation"))
    assert held_out(tmp_path / "shard_0.parquet") == ["text 0"]


@pytest.mark.parametrize("name", ["test.jsonl", "validation-00000-of-00001.jsonl"])
def test_a_folder_holds_out_its_files_named_test_or_validation(tmp_path: Path, name: str) -> None:
    write_lines(tmp_path / "train.jsonl", [{"text": "for training"}])
    assert held_out(tmp_path) == ["for training"]
    write_lines(tmp_path / name, [{"text": "held out"}, {"text": "  "}])
    assert held_out(tmp_path) == ["held out"]


def test_questions_stand_above_their_answers(tmp_path: Path) -> None:
    sums = [{"question": "1 + 1?", "answer": "2"}, {"question": "2 + 2?", "answer": "4"}]
    math = write_lines(tmp_path / "math.jsonl", sums)
    code = [{"task_id": "1", "prompt": "def f():\n", "canonical_solution": "    pass\n"}]
    assert held_out(math) == ["1 + 1?\n2", "2 + 2?\n4"]
    assert held_out(write_lines(tmp_path / "code.jsonl", code)) == ["def f():\n    pass\n"]
    assert held_out(math, text_field="answer") == ["2", "4"]
    assert held_out(write_lines(tmp_path / "text.jsonl", [sums[0] | {"text": "c"}])) == ["c"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "nothing to evaluate on"),
        ('{"text": " "}\n', "nothing to evaluate on"),
        ('{"prompt": "a"}\n', "line 1 has no text in text_field='text'.*prompt"),
        ('{"question": "a", "answer": "b"}\n{"question": "a"}\n', "line 2 has no text in text_field='answer'"),
        ("[1]\n", "line 1 is not a JSON object"),
        ("{\n", "line 1 is not valid JSON"),
        ("[" * 100_000, "line 1 is not valid JSON"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(lines)
    with pytest.raises(ValueError, match=message):
        open_held_out(str(path))

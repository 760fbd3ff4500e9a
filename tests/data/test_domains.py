"""Held-out documents of a source, on which models are measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases import write_shards
from commands import write_lines
from expert_threshold.data import open_held_out, open_source


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
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(lines)
    with pytest.raises(ValueError, match=message) as error:
        open_held_out(str(path))
    assert "\n" not in str(error.value)

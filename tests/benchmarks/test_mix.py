"""`benchmarks/mix.py`: every character once, in pieces, in an order that the seed fixes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import mix


def test_all_text_is_there_in_pieces_of_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = {name: [f"{name} {i} " * 40 for i in range(60)] + ["short"] for name in ("a.jsonl", "b.jsonl")}
    for name, texts in documents.items():
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")

    def mixed(seed: int) -> list[str]:
        sources = [str(tmp_path / name) for name in documents]
        command = ["mix", *sources, "--out", str(tmp_path / "out.jsonl"), "--characters", "100", "--seed", str(seed)]
        monkeypatch.setattr(sys, "argv", command)
        mix.main()
        return [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]

    whole = [text for texts in documents.values() for text in texts]
    expected = [text[start : start + 100] for text in whole for start in range(0, len(text), 100)]
    assert sorted(mixed(0)) == sorted(expected)
    assert mixed(0) == mixed(0) != mixed(1) != expected
    some = list(mix.pieces([str(tmp_path / name) for name in documents], 100, 0.001))  # type: ignore[arg-type]
    assert [sum(name in piece for piece in some) for name in documents] == [10, 10]

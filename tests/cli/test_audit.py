"""`et audit`: one line, one exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cases import et, said
from commands import Refused
from expert_threshold.data import embedded


@pytest.fixture(autouse=True)
def little_text(monkeypatch: pytest.MonkeyPatch, text: Path) -> None:
    words = text.read_text()[:400]
    monkeypatch.setattr(embedded, "documents", lambda: ([], [("a.py", words), ("a.py#docstrings", words)]))


def test_a_run_is_audited_in_one_line(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    (line,) = said("audit", run, "--tokens", 200, "--page", page).splitlines()
    assert line.startswith(f"{run}: causal: ")
    assert "2 layers of 16 experts" in line
    assert f"<h1>{run}: causal</h1>" in page.read_text()


def test_training_that_looks_ahead_gives_1(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """During warmup, tokens compete for experts in expert threshold as in expert choice."""
    assert et("audit", run, "--tokens", 200, "--training", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["leaks"]
    assert found["training"]
    assert {check["what"] for check in found["checks"] if check["changed"]} >= {"later tokens", "neighbours"}


def test_an_export_is_audited_with_padding(run: Path, text: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    said("export", run, "--to", tmp_path / "export")
    other = tmp_path / "other.txt"
    other.write_text("0123456789 " * 99)
    found = json.loads(said("audit", tmp_path / "export", "--tokens", 200, "--data", text, "--data", other, "--json"))
    assert all(check["positions"] for check in found["checks"])
    assert [list(layer["load"]) for layer in found["layers"]] == [[str(text), str(other)]] * 2
    assert found["layers"][0]["information"] > 0


def test_bad_input_is_refused(run: Path, tmp_path: Path, refused: Refused) -> None:
    empty, short = tmp_path / "empty.txt", tmp_path / "short.txt"
    empty.touch()
    short.write_text("the cat")
    refused(["audit", tmp_path / "missing"], "missing does not exist")
    refused(["audit", tmp_path], "contains no config.json")
    refused(["audit", run, "--data", tmp_path / "missing.txt"], "missing.txt", "does not exist")
    refused(["audit", run, "--data", empty], "empty.txt", "no documents")
    refused(["audit", run, "--data", short], "tokens; at least 16 are needed")
    refused(["audit", run, "--tokens", 3], "--tokens: expected a whole number of at least 16")
    refused(["audit", run, "--page", tmp_path / "none" / "page.html"], "--page", "existing folder")
    refused(["audit", run, "--page", tmp_path], "--page", "existing folder")
    refused(["audit", run, "--step", 3], "no checkpoint of step 3")
    pytest.importorskip("transformers")
    for content in ("{}", '{"model_type": "nonsense"}', '{"model_type": "bert"}', '{"model_type": "llama"}', "{"):
        (tmp_path / "config.json").write_text(content)
        refused(["audit", tmp_path], str(tmp_path))
    refused(["audit", tmp_path, "--step", 3], str(tmp_path))

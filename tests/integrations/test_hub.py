"""Models on the Hugging Face hub, played by a stand-in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("huggingface_hub", reason="needs huggingface_hub: pip install -e '.[hub]'")

from cases import et, small_model, write_run, write_text
from expert_threshold.data.public import VARIABLE
from expert_threshold.runs import load_model
from hub import hub_server, point_at


def test_a_pushed_export_is_imported_and_trained_on_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    run, exported, imported = tmp_path / "run", tmp_path / "exported", tmp_path / "imported"
    write_run(run, small_model())
    with hub_server(monkeypatch) as server:
        assert et("export", run, "--to", exported, "--push", "someone/first") == 0
        assert f"pushed to {server.url('someone/first')}" in capsys.readouterr().out
        assert (server.created[0]["name"], server.created[0]["organization"]) == ("first", "someone")
        assert "private" in (server.created[0].get("visibility"), *server.created[0])  # by older versions of the client
        assert server.files == {file.name: file.read_bytes() for file in exported.iterdir()}
        assert et("import", "hub:someone/first", "--out", imported) == 0
        start = ("--init-from", "hub:someone/first", "--data", write_text(tmp_path / "text.jsonl"), "--steps", 1)
        for name in ("a", "b"):
            assert et("train", *start, "--batch-size", 2, "--out", tmp_path / name) == 0
        assert not any("modeling" in name for name in server.sent)  # no code is downloaded
        server.files.clear()
        assert et("import", "hub:someone/other", "--out", tmp_path / "other") == 2
        assert "someone/other cannot be downloaded from the Hugging Face hub" in capsys.readouterr().err
    [cached] = (tmp_path / "cache" / "runs" / "someone" / "first").iterdir()
    model, back = load_model(run)[0], load_model(imported)[0]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[name]), name
    assert str(cached) in (tmp_path / "b" / "config.json").read_text(encoding="utf-8")


def test_without_a_network_a_model_that_is_not_cached_is_refused_without_retries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("a retry"))
    point_at("http://127.0.0.1:9", monkeypatch)
    assert et("audit", "missing/thing") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "missing/thing, which is not a folder here, cannot be downloaded" in line

"""Runs as folders for Hugging Face and back, without its packages."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from cases import RULES, et, small_model, write_run, write_text
from commands import edit, read, write_lines
from expert_threshold.data.public import VARIABLE
from expert_threshold.integrations.export import export_run, import_folder
from expert_threshold.integrations.rule_source import rule_files
from expert_threshold.model import TRUNKS
from expert_threshold.routing import Rule
from expert_threshold.runs import RunFolder, load_model
from hub import hub_server, point_at

FULL = mock.Mock(side_effect=OSError(28, "No space left on device"))
OPTIONS = {
    "swiglu": {"activation": "swiglu", "shared_experts": 0},
    "trunk": {**TRUNKS["nanochat"], "short_window": 5},
    "grouped_query": {"kv_heads": 1, "gate_norm": "fanout", "z_loss": 0.1, "dense_layers": 0},
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_import_undoes_export(rule: Rule | None, options: dict[str, object], tmp_path: Path) -> None:
    model = small_model(rule, **options)
    write_run(tmp_path / "run", model, step=7)
    folder = export_run(tmp_path / "run", tmp_path / "folder")
    run = import_folder(folder, tmp_path / "again")
    again, tokenizer = load_model(run.path)
    assert again.config == model.config
    assert tokenizer.encode("the cat") == load_model(tmp_path / "run")[1].encode("the cat")
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], value) for name, value in model.state_dict().items())
    assert run.latest_checkpoint() == 7
    assert run.section("train") == {"batch_size": 2, "accumulation": 1}


def test_rows_that_only_pad_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    model = small_model(**TRUNKS["tuned"])
    write_run(tmp_path / "run", model)
    folder = export_run(tmp_path / "run", tmp_path / "folder")
    pad_vocabulary(folder)
    again = load_model(import_folder(folder, tmp_path / "again").path)[0]
    assert again.config == model.config
    assert all(torch.equal(again.state_dict()[name], value) for name, value in model.state_dict().items())


def test_a_folder_tells_nothing_of_the_machine_it_was_made_on(tmp_path: Path) -> None:
    write_run(tmp_path / "run", small_model())
    folder = export_run(tmp_path / "run", tmp_path / "folder")
    for file in folder.iterdir():
        assert b"/somewhere" not in file.read_bytes(), file
        assert str(tmp_path).encode() not in file.read_bytes(), file


def test_the_model_card_has_the_run_s_numbers(tmp_path: Path) -> None:
    model = small_model()
    run = write_run(tmp_path / "run", model)
    parameters = sum(weight.numel() for weight in model.parameters())
    card = (export_run(run.path, tmp_path / "folder") / "README.md").read_text()
    assert f"| parameters | {parameters:,} |" in card
    assert "| validation loss, nats per token | 5.2500 |" in card
    assert "4 steps, 512 tokens" in card
    evaluation = {"validation": {"loss": 5.125, "bits_per_byte": None}, "core": {"tasks": {"t": {"accuracy": 0.5}}}}
    (run.path / "evaluation.json").write_text(json.dumps({"step": 4} | evaluation))
    card = (export_run(run.path, tmp_path / "second") / "README.md").read_text()
    assert "| validation loss, nats per token | 5.1250 |" in card
    assert "| t, accuracy | 0.5000 |" in card
    (run.path / "evaluation.json").write_text(json.dumps({"step": 3} | evaluation))  # of another checkpoint
    assert "5.2500" in (export_run(run.path, tmp_path / "third") / "README.md").read_text()


def test_export_overwrites_nothing_and_leaves_nothing_partial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run", small_model())
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    with pytest.raises(ValueError, match=r"--to .*folder already exists; name another folder"):
        export_run(tmp_path / "run", tmp_path / "folder")
    monkeypatch.setattr("expert_threshold.runs.checkpoint.save_file", FULL)
    with pytest.raises(OSError, match="No space"):
        export_run(tmp_path / "run", tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "run"]


def write(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def delete(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def complex_head(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"lm_head.weight": weights["lm_head.weight"].to(torch.complex64)}, folder / "model.safetensors")


def with_config(**changes: object) -> Callable[[Path], object]:
    return lambda folder: write_lines(folder / "config.json", [read(folder / "config.json") | changes])


def add_token(folder: Path, token: str = "<|user|>") -> None:
    """A folder after `add_tokens`, `resize_token_embeddings` and saving."""
    pad_vocabulary(folder, 1)
    with edit(folder / "tokenizer.json") as content:
        content["added_tokens"].append({"id": 270, "content": token})


def pad_vocabulary(folder: Path, rows: int = 50) -> None:
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(("embed.weight", "lm_head.weight"))]:
        weights[name] = torch.cat((weights[name], torch.ones(rows, weights[name].shape[1])))
    save_file(weights, folder / "model.safetensors")
    with_config(vocab_size=270 + rows)(folder)


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (write("config.json", '{"model_type": "llama"}'), "no config.json with model_type expert_threshold"),
        (write("model.safetensors", "no weights"), r"model\.safetensors is damaged"),
        (delete("model.safetensors"), r"model\.safetensors is missing"),
        (complex_head, r"lm_head\.weight is complex"),
        (delete("tokenizer.json"), r"tokenizer\.json is missing"),
        (write(INDEX, '{"weight_map": {"a": "../b.json"}}'), r"lists .\.\./b\.json., which is not a file in"),
        (write(INDEX, '{"weight_map": []}'), r"model\.safetensors\.index\.json is damaged"),
        (with_config(run={"step": "ten"}), r"config\.json is damaged \(the step of its run is 'ten'\)"),
        (with_config(run={"corpus": 3}), r"config\.json is damaged"),
        (with_config(run={"train": {"a": float("nan")}}), r"config\.json is damaged"),
        (with_config(d_model=64), r"the weights do not match config\.json"),
        (add_token, r"the added tokens '<\|user\|>' cannot be imported; save the model after"),
        (with_config(vocab_size=260), r"the model has 260 tokens, but its run has 270"),
        (with_config(quantization_config={"quant_method": "bitsandbytes"}), r"quantised \(bitsandbytes\)"),
        (with_config(architectures=["ExpertThresholdModel"]), r"no language-model head"),
    ],
)
def test_a_damaged_folder_is_not_imported(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    write_run(tmp_path / "run", small_model())
    folder = export_run(tmp_path / "run", tmp_path / "folder")
    damage(folder)
    with pytest.raises(ValueError, match=message) as caught:
        import_folder(folder, tmp_path / "out")
    assert len(str(caught.value).replace(str(tmp_path), "")) < 350
    assert not (tmp_path / "out").exists()


def test_an_import_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run", small_model())
    folder = export_run(tmp_path / "run", tmp_path / "folder")
    before = set(tmp_path.iterdir())
    monkeypatch.setattr(RunFolder, "save_checkpoint", FULL)
    with pytest.raises(OSError, match="No space left"):
        import_folder(folder, tmp_path / "new" / "out")
    assert set(tmp_path.iterdir()) == before


# The rule's source beside the weights.


def rule_of(imports: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str = "mine") -> Any:
    """The rule of a package's module whose first lines are `imports`."""
    for name, text in {"__init__": "", "beside": "X = 1\n"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    text = f"{imports}\nfrom expert_threshold.routing import TopP\n\n\nclass Mine(TopP): pass\n"
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path.parent)
    return import_module(f"{tmp_path.name}.{module}").Mine(4, 1)


@pytest.mark.parametrize(
    ("imports", "words"),
    [
        ("from .beside import X", "a single file"),
        ("from . import beside", "a single file"),
        ("from expert_threshold import follow", "'follow': an exported rule may import only"),
        ("from expert_threshold.model import GPT", "an exported rule may import only"),
    ],
)
def test_a_rule_of_two_files_is_refused(
    imports: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=words):
        rule_files(rule_of(imports, tmp_path, monkeypatch))


def test_the_rules_themselves_may_come_from_the_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = rule_files(rule_of("from expert_threshold import TokenChoice", tmp_path, monkeypatch))
    assert "from .routing import TokenChoice" in files["rule_mine.py"]


def test_a_foreign_file_named_as_the_package_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = rule_files(rule_of("from expert_threshold import TokenChoice", tmp_path, monkeypatch, "expert_threshold"))
    assert "class Mine" in files["rule_expert_threshold.py"]
    assert "class ExpertThreshold" in files["routing_expert_threshold.py"]
    assert "from .routing_expert_threshold import" in files["routing.py"]


# The hub, played by a stand-in.


def test_a_pushed_export_is_imported_and_trained_on_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("huggingface_hub", reason="needs huggingface_hub: pip install -e '.[hub]'")
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

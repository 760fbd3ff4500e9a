"""`et data`: downloads from a server of this machine, a tokenizer, and tokens on disk."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from cases import et
from expert_threshold.cli import data as command
from expert_threshold.data import Tokenizer, open_source, public, token_files
from expert_threshold.data.cache import VARIABLE
from expert_threshold.runs import RunFolder

TEXTS = [f"Document {number} of the shards: " + "it says little. " * (number % 9) for number in range(90)]
BUNDLE = {
    "core.yaml": """icl_tasks:
- label: capitals
  dataset_uri: world/capitals.jsonl
  num_fewshot: [0]
  icl_task_type: language_modeling
""",
    "eval_meta_data.csv": "Eval Task,Task Category,Task Type,#shots,#datapoints,Random baseline\n"
    "capitals,world knowledge,language modeling,0,1,0\n",
    "eval_data/world/capitals.jsonl": json.dumps({"context": "The capital of France is", "continuation": "Paris"})
    + "\n",
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> None:
    """A download that always works: shards, and the eval bundle."""

    def content(name: str) -> bytes:
        buffer = io.BytesIO()
        if name.endswith(".zip"):
            with zipfile.ZipFile(buffer, "w") as archive:
                for path, text in BUNDLE.items():
                    archive.writestr(f"eval_bundle/{path}", text)
        else:
            third = {"shard_00000": 0, "shard_01822": 60}.get(Path(name).stem, 30)
            table = pyarrow.table({"text": TEXTS[third : third + 30]})
            pyarrow.parquet.write_table(table, buffer, row_group_size=10)
        return buffer.getvalue()

    def download(dataset: str, names: list[str], folder: Path, *_: object) -> None:
        for name in names:
            (folder / name).write_bytes(content(name))

    monkeypatch.setattr(public, "download", download)
    monkeypatch.setattr(public, "list_files", lambda dataset: dict.fromkeys(["README.md", "shard_00000.parquet"]))
    monkeypatch.setattr(public, "fetch", lambda url, path, *_: path.write_bytes(content(url)))


def write_shards(folder: Path) -> Path:
    """Three shards of three row groups each."""
    folder.mkdir(parents=True)
    for third in range(3):
        table = pyarrow.table({"text": TEXTS[30 * third : 30 * third + 30]})
        pyarrow.parquet.write_table(table, folder / f"shard_{third}.parquet", row_group_size=10)
    return folder


def test_help_names_what_there_is_and_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert et("data", "--help") == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: et data")
    for name, entry in command.ENTRIES.items():
        assert f"et data {name} " in text
        assert et("data", name, "--help") == 0
        shown = " ".join(capsys.readouterr().out.split())
        for option in entry.options:
            assert option.flag in shown
            assert " ".join(option.help.split()) in shown


def test_from_shards_over_a_tokenizer_and_tokens_to_a_run(
    world: None, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert et("data", "fineweb-edu", "--shards", 2) == 0
    assert "3 shards" in capsys.readouterr().out
    assert not (cache / "fineweb-edu" / ".lock").exists()
    assert et("data", "tokenizer", "--vocab-size", 270, "--characters", 1000) == 0
    beside = Tokenizer.load(cache / "fineweb-edu" / "tokenizer.json")
    expected = Tokenizer.train(open_source("fineweb-edu").beginning(1000), 270)
    assert beside.hash == expected.hash
    assert et("data", "tokenize", "--out", tmp_path / "tokens") == 0
    said = capsys.readouterr().out
    assert f"next: et train --data {tmp_path / 'tokens'} --vocab-size 270" in said
    small = ["tiny", "--vocab-size", 270, "--steps", 1, "--batch-size", 2, "--context", 32, "--eval-tokens", 64]
    for name, source in (("text", "fineweb-edu"), ("tokens", tmp_path / "tokens")):
        assert et("train", *small, "--data", source, "--out", tmp_path / "runs" / name) == 0
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("text", "tokens")
    ]
    assert losses[0] == losses[1] != []


def test_more_shards_do_not_change_the_runs_that_began_before(
    world: None, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    small = ["--vocab-size", 270, "--steps", 2, "--batch-size", 2, "--context", 32, "--eval-tokens", 64]
    assert et("data", "fineweb-edu", "--shards", 2) == 0
    assert et("train", "tiny", *small, "--data", "fineweb-edu", "--checkpoint-every", 1, "--out", run) == 0
    weights = run / "checkpoints" / "step_000002" / "model.safetensors"
    before = weights.read_bytes()
    shutil.rmtree(weights.parent)
    assert et("data", "fineweb-edu", "--shards", 4) == 0
    assert et("train", "--resume", run) == 0
    assert weights.read_bytes() == before
    assert et("evaluate", run, "--bundle", "none", "--eval-tokens", 64) == 0
    limited = ["tiny", *small, "--data", "fineweb-edu", "--out", tmp_path / "limited"]
    assert et("train", *limited, "--train-shards", 2) == 0
    found = tmp_path / "limited" / "checkpoints" / "step_000002" / "model.safetensors"
    assert found.read_bytes() == before
    compare = ["compare", "tiny", *small, "--data", "fineweb-edu", "--rules", "dense", "--out", tmp_path / "compare"]
    shutil.rmtree(cache)
    assert et("data", "fineweb-edu", "--shards", 2) == 0
    assert et(*compare, "--seeds", 1) == 0
    assert et("data", "fineweb-edu", "--shards", 4) == 0
    assert et(*compare, "--seeds", 2) == 0
    hashes = {RunFolder.open(tmp_path / "compare" / "dense" / f"seed_{n}").config["corpus"]["hash"] for n in (0, 1)}
    assert len(hashes) == 1
    capsys.readouterr()
    assert et("train", *limited[:-1], tmp_path / "none", "--train-shards", 5) == 2
    assert "train_shards=5: fineweb-edu has 4 for training" in capsys.readouterr().err
    assert et("train", "tiny", "--train-shards", 1, "--out", tmp_path / "none") == 2
    assert "embedded has no Parquet shards; leave it out" in capsys.readouterr().err


def test_shards_in_a_folder_of_the_folder_find_the_tokenizer_that_was_made_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was written beside the folder and looked for beside the shards."""
    shards = write_shards(tmp_path / "text" / "data")
    assert et("data", "tokenizer", tmp_path / "text", "--vocab-size", 270) == 0
    assert et("data", "tokenize", tmp_path / "text", "--out", tmp_path / "tokens") == 0
    assert (
        Tokenizer.load(tmp_path / "text" / "tokenizer.json").hash
        == Tokenizer.load(tmp_path / "tokens" / "tokenizer.json").hash
    )
    capsys.readouterr()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["  ", "\n"]}), shards / "shard_3.parquet")
    assert et("train", "tiny", "--data", tmp_path / "text", "--vocab-size", 270, "--out", tmp_path / "run") == 2
    assert "too few for a loss; give more text, or --eval-every none" in capsys.readouterr().err
    twice = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    pyarrow.parquet.write_table(twice, tmp_path / "twice.parquet")
    assert et("train", "tiny", "--data", tmp_path / "twice.parquet", "--out", tmp_path / "run") == 2
    assert "several columns text_field='text'" in capsys.readouterr().err


def test_a_second_kill_loses_no_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index was emptied when tokenizing went on, and written with the next new part."""
    shards = write_shards(tmp_path / "text")
    assert et("data", "tokenizer", shards, "--vocab-size", 270) == 0
    assert et("data", "tokenize", shards, "--out", tmp_path / "tokens") == 0
    index = tmp_path / "tokens" / "train.jsonl"
    manifest = json.loads((tmp_path / "tokens" / "tokens.json").read_text())
    (tmp_path / "tokens" / "tokens.json").write_text(json.dumps(manifest | {"finished": False}))
    kept = "".join(index.read_text().splitlines(keepends=True)[:2])
    index.write_text(kept)
    there: list[str] = []
    monkeypatch.setattr(token_files, "_read", lambda *_: there.append(index.read_text()) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        et("data", "tokenize", shards, "--out", tmp_path / "tokens")
    assert there[0] == kept


def test_a_data_set_of_the_hub_is_downloaded_into_a_folder_to_train_on(
    world: None, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert et("data", "hub", "someone/text") == 0
    folder = cache / "hub" / "someone" / "text"
    assert f"et train --data {folder}" in capsys.readouterr().out
    assert open_source(str(folder)).bytes > 0


def test_damaged_shards_are_skipped_while_a_tokenizer_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = write_shards(tmp_path / "text")
    damaged = shards / "shard_0.parquet"
    damaged.write_bytes(damaged.read_bytes()[:4] + bytes(60) + damaged.read_bytes()[64:])
    make = ["data", "tokenizer", shards, "--vocab-size", 270]
    small = ["train", "tiny", "--data", shards, "--vocab-size", 270, "--steps", 1, "--batch-size", 2, "--context", 32]
    for arguments in (make, [*small, "--out", tmp_path / "run"]):
        assert et(*arguments) == 2
        assert f"{damaged} is damaged" in capsys.readouterr().err
    assert et(*make, "--skip-damaged") == 0
    assert f"skipped: {damaged} is damaged" in capsys.readouterr().err
    (shards / "tokenizer.json").unlink()
    assert et(*small, "--skip-damaged", "--eval-tokens", 64, "--out", tmp_path / "run") == 0
    assert f"skipped: {damaged} is damaged" in capsys.readouterr().out


def test_the_eval_bundle_is_found_by_evaluate(
    world: None, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert et("data", "core") == 0
    assert f"1 tasks in {cache / 'core'}" in capsys.readouterr().out
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    run = tmp_path / "run"
    small = ["tiny", "--vocab-size", 270, "--steps", 1, "--batch-size", 2, "--context", 32, "--data", text]
    assert et("train", *small, "--out", run) == 0
    assert et("evaluate", run, "--no-validation") == 0
    assert "capitals" in capsys.readouterr().out
    assert et("evaluate", run, "--bundle", "none", "--eval-tokens", 32) == 0
    assert "capitals" not in capsys.readouterr().out


def test_what_cannot_be_done_is_one_line(
    world: None, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(message: str, *arguments: object) -> None:
        assert et("data", *arguments) == 2
        *_, error = capsys.readouterr().err.splitlines()  # before it stands what was begun
        assert error.startswith("et data: ")
        assert message in error

    refused("name a subcommand: fineweb-edu, hub, core, tokenizer, tokenize")
    refused("unknown subcommand fineweb; did you mean fineweb-edu?", "fineweb")
    refused("--shards 0: there are 1822 for training; give from 1", "fineweb-edu", "--shards", 0)
    refused("unknown option --shard; did you mean --shards?", "fineweb-edu", "--shard", 3)
    refused("fineweb-edu is not in", "tokenizer")
    file = tmp_path / "file"
    file.write_text("some text\n\n" * 2000)
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, str(file))
        refused("cannot be written", "core")
    assert et("data", "fineweb-edu", "--shards", 2) == 0
    refused("vocab_size=65536 is too large for this text: it supports fewer than", "tokenizer")
    refused("no tokenizer.json beside fineweb-edu; make one with et data tokenizer", "tokenize")
    (cache / "fineweb-edu" / "tokenizer.json").write_text("{}")
    capsys.readouterr()
    refused("is not a tokenizer", "tokenizer")
    text = tmp_path / "a.txt"
    text.write_text("some text\n\n" * 2000)
    refused("is no folder of Parquet shards; name one", "tokenize", text)
    refused("does not exist", "tokenize", tmp_path / "none")

"""`et data`: downloads from a server of this machine, a tokenizer, and tokens on disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from cases import et, said, write_bundle, write_shards
from commands import Options, Refused, lines, write_lines
from expert_threshold.data import Tokenizer, open_source, public
from expert_threshold.data.public import VARIABLE
from expert_threshold.runs import RunFolder

TEXTS = [f"Document {number} of the shards: " + "it says little. " * (number % 9) for number in range(90)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A download of shards and the eval bundle that always works."""
    capitals = [{"context": "The capital of France is", "continuation": "Paris"}]
    write_bundle(tmp_path / "world" / "eval_bundle", {"capitals": ("language_modeling", 0, 0, capitals)})
    archive = shutil.make_archive(str(tmp_path / "world"), "zip", tmp_path / "world")

    def download(dataset: str, names: list[str], folder: Path, *_: object) -> None:
        for name in names:
            third = {"shard_00000": 0, "shard_01822": 60}.get(Path(name).stem, 30)
            table = pyarrow.table({"text": TEXTS[third : third + 30]})
            pyarrow.parquet.write_table(table, folder / name, row_group_size=10)

    monkeypatch.setattr(public, "download", download)
    monkeypatch.setattr(public, "list_files", lambda dataset: dict.fromkeys(["README.md", "shard_00000.parquet"]))
    monkeypatch.setattr(public, "fetch", lambda url, path, *_: shutil.copy(archive, path))


SIZES = "--vocab-size 270 --batch-size 2 --context 32 --layers 2 --d-model 32 --model.heads 2"


@pytest.fixture(scope="module")
def small() -> Options:
    return ["tiny", *SIZES.split(), "--threads", 1, "--eval-tokens", 64]


def test_from_shards_to_runs(world: None, cache: Path, small: Options, refused: Refused, tmp_path: Path) -> None:
    assert "3 shards" in said("data", "fineweb-edu", "--shards", 2)
    assert not (cache / "fineweb-edu" / ".lock").exists()
    assert et("data", "tokenizer", "--vocab-size", 270, "--characters", 1000) == 0
    beside = Tokenizer.load(cache / "fineweb-edu" / "tokenizer.json")
    expected = Tokenizer.train(open_source("fineweb-edu").beginning(1000), 270)
    assert beside.hash == expected.hash
    tokenized = said("data", "tokenize", "--out", tmp_path / "tokens")
    assert f"next: et train --data {tmp_path / 'tokens'} --vocab-size 270" in tokenized
    losses = []
    for name, source in (("text", "fineweb-edu"), ("tokens", tmp_path / "tokens")):
        run = tmp_path / "runs" / name
        assert et("train", *small, "--steps", 1, "--data", source, "--out", run) == 0
        losses.append([record["loss"] for record in lines(run / "metrics.jsonl")])
    assert losses[0] == losses[1] != []
    other = ["train", *small, "--vocab-size", 271, "--data", tmp_path / "tokens", "--out", tmp_path / "other"]
    refused(other, "vocab_size=271, but ", "have a vocabulary of 270; use --vocab-size 270")


def test_more_shards_change_no_run(world: None, cache: Path, small: Options, refused: Refused, tmp_path: Path) -> None:
    run, text = tmp_path / "run", [*small, "--steps", 2, "--data", "fineweb-edu"]
    said("data", "fineweb-edu", "--shards", 2)
    said("train", *text, "--checkpoint-every", 1, "--out", run)
    weights = Path("checkpoints", "step_000002", "model.safetensors")
    before = (run / weights).read_bytes()
    shutil.rmtree((run / weights).parent)
    said("data", "tokenize", "--tokenizer", run / "tokenizer.json", "--out", tmp_path / "tokens")
    said("data", "fineweb-edu", "--shards", 4)
    said("train", "--resume", run)
    assert (run / weights).read_bytes() == before
    said("evaluate", run, "--bundle", "none", "--eval-tokens", 64)
    said("train", *text, "--data.train-shards", 2, "--out", tmp_path / "limited")
    assert (tmp_path / "limited" / weights).read_bytes() == before
    shutil.copytree(cache / "fineweb-edu", tmp_path / "moved")
    for place, steps in (("moved", 3), ("tokens", 4)):
        said("train", "--resume", tmp_path / "limited", "--data", tmp_path / place, "--steps", steps)
    shutil.rmtree(cache)
    for shards, seeds in ((2, 1), (4, 2)):
        said("data", "fineweb-edu", "--shards", shards)
        said("compare", *text, "--rules", "dense", "--out", tmp_path / "compare", "--seeds", seeds)
    hashes = {RunFolder.open(tmp_path / "compare" / "dense" / f"seed_{n}").config["corpus"]["hash"] for n in (0, 1)}
    assert len(hashes) == 1
    none = ["--out", tmp_path / "none"]
    refused(["train", *text, "--data.train-shards", 5, *none], "train_shards=5: fineweb-edu has 4 training shards")
    refused(["train", "tiny", "--data.train-shards", 1, *none], "embedded has no Parquet shards; omit the option")


def test_shards_in_a_subfolder_find_the_tokenizer_that_was_made_for_them(refused: Refused, tmp_path: Path) -> None:
    """Regression: it was written next to the folder, but looked for next to the shards."""
    shards = write_shards(tmp_path / "text" / "data", TEXTS)
    assert et("data", "tokenizer", tmp_path / "text", "--vocab-size", 270) == 0
    assert et("data", "tokenize", tmp_path / "text", "--out", tmp_path / "tokens") == 0
    first, second = (Tokenizer.load(tmp_path / name / "tokenizer.json").hash for name in ("text", "tokens"))
    assert first == second
    refused(["data", "tokenize", tmp_path / "tokens"], "does not have two or more Parquet shards")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["  ", "\n"]}), shards / "shard_3.parquet")
    train = ["train", "tiny", "--vocab-size", 270, "--out", tmp_path / "run", "--data"]
    refused([*train, tmp_path / "text"], "too little validation text for a loss", "--eval-every none")
    twice = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    pyarrow.parquet.write_table(twice, tmp_path / "twice.parquet")
    refused([*train, tmp_path / "twice.parquet"], "several columns data.text_field='text'")


def test_a_data_set_of_the_hub_is_downloaded_into_a_folder_to_train_on(world: None, cache: Path) -> None:
    folder = cache / "hub" / "someone" / "text"
    assert f"et train --data {folder}" in said("data", "hub", "someone/text")
    assert open_source(str(folder)).bytes > 0


def test_damaged_shards_are_refused_by_name(small: Options, refused: Refused, tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "text", TEXTS)
    damaged = shards / "shard_0.parquet"
    damaged.write_bytes(damaged.read_bytes()[:4] + bytes(60) + damaged.read_bytes()[64:])
    refused(["data", "tokenizer", shards, "--vocab-size", 270], f"{damaged} is damaged")
    refused(["train", *small, "--data", shards, "--out", tmp_path / "run"], f"{damaged} is damaged")


def test_the_eval_bundle_is_found_by_evaluate(world: None, cache: Path, small: Options, tmp_path: Path) -> None:
    assert f"1 tasks in {cache / 'core'}" in said("data", "core")
    text, run = write_lines(tmp_path / "text.jsonl", [{"text": text} for text in TEXTS]), tmp_path / "run"
    assert et("train", *small, "--steps", 1, "--data", text, "--out", run) == 0
    assert "capitals" in said("evaluate", run, "--no-validation")
    assert "capitals" not in said("evaluate", run, "--bundle", "none", "--eval-tokens", 32)


def test_what_cannot_be_done_is_refused(
    world: None, cache: Path, text: Path, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "fineweb-edu").mkdir(parents=True)
    for command, message in (
        ("", "no subcommand was given; use one of fineweb-edu, hub, core, tokenizer, tokenize"),
        ("fineweb", "unknown subcommand fineweb; did you mean fineweb-edu?"),
        ("fineweb-edu --shards 0", "--shards 0 must be a number from 1 to 1822"),
        ("fineweb-edu --shard 3", "unknown option --shard; did you mean --shards?"),
        ("tokenizer", "fineweb-edu is not in"),
        ("tokenizer missing", "missing does not exist"),
        ("tokenizer missing --vocab-size 5", "vocab_size=5 is too small"),
        (f"tokenizer {text} --vocab-size 300", "--out is required"),  # it was called an unwritable cache folder
        (f"tokenize {text}", "does not have two or more Parquet shards"),
        (f"tokenize {tmp_path / 'none'}", "does not exist"),
    ):
        refused(["data", *command.split()], message)
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, str(text))
        refused(["data", "core"], "is not writable")
    assert et("data", "fineweb-edu", "--shards", 2) == 0
    refused(["data", "tokenizer"], "vocab_size=65536 is too large for this text")
    refused(["data", "tokenize"], "fineweb-edu has no tokenizer.json; train one with et data tokenizer")
    (cache / "fineweb-edu" / "tokenizer.json").write_text("{}")
    refused(["data", "tokenizer"], "is not a supported tokenizer")

"""From text to tokens: shards read on demand, tokens on disk, and tokens in memory."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cases import write_shards
from commands import content
from expert_threshold.data import Corpus, Loader, Tokenizer, open_source, pack
from expert_threshold.data.tokens import write_tokens

TEXTS = [f"Document {number}: " + "größer, weiter, höher. " * (number % 7 + 1) for number in range(240)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, 300)


@pytest.fixture
def corpus(tmp_path: Path) -> Any:
    return open_source(str(write_shards(tmp_path / "shards", TEXTS, 4, 16)))


# Parquet.


def test_shards_are_opened_without_reading_their_text(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyarrow.parquet.ParquetFile.iter_batches", None)
    corpus = open_source(corpus.name)
    assert [size.documents for size in corpus.sizes.values()] == [180, 60]
    assert corpus.bytes == pytest.approx(sum(len(text.encode()) for text in TEXTS), rel=0.25)


def test_the_hash_of_shards_follows_names_and_contents(corpus: Corpus, tmp_path: Path) -> None:
    folder, before = Path(corpus.name), corpus.hash
    assert open_source(str(write_shards(tmp_path / "again", TEXTS, 4, 16))).hash == before
    (folder / "shard_0.parquet").rename(folder / "shard_00.parquet")
    assert open_source(str(folder)).hash != before
    write_shards(folder, TEXTS, 4, 15)
    (folder / "shard_00.parquet").unlink()
    assert open_source(str(folder)).hash != before


def test_packing_stops_once_there_is_enough(corpus: Corpus, tokenizer: Tokenizer) -> None:
    everything = pack(corpus, tokenizer, "validation")
    some = pack(corpus, tokenizer, "validation", max_tokens=10)
    assert 10 <= len(some) < len(everything)
    assert everything.ids[: len(some)].tolist() == some.ids.tolist()
    texts = [tokenizer.decode(document[1:].tolist()) for document in np.split(everything.ids, everything.offsets[1:-1])]
    assert texts == list(corpus.documents("validation")) == TEXTS[180:]


def test_fineweb_edu_opens_the_downloaded_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERT_THRESHOLD_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"fineweb-edu is not in .*; download it with et data fineweb-edu --shards N"):
        open_source("fineweb-edu")
    folder = write_shards(tmp_path / "fineweb-edu", TEXTS)
    (folder / "shard_0.parquet").rename(folder / "shard_00000.parquet")
    (folder / "shard_1.parquet").rename(folder / "shard_01822.parquet")
    (folder / "shard_2.parquet").unlink()
    corpus = open_source("fineweb-edu")
    assert list(corpus.documents("train")) == TEXTS[:80]
    assert list(corpus.documents("validation")) == TEXTS[80:160]
    (folder / "shard_01822.parquet").rename(folder / "shard_00001.parquet")
    with pytest.raises(ValueError, match="fineweb-edu is not in"):
        open_source("fineweb-edu")


# Tokens on disk.


def tokenized(corpus: Corpus, tokenizer: Tokenizer, folder: Path, **options: Any) -> Path:
    about = {"corpus": corpus.hash, "sizes": {split: list(size) for split, size in corpus.sizes.items()}}
    splits = {split: corpus.parts(split, tokenizer) for split in corpus.sizes}
    write_tokens(folder, splits, tokenizer, about, **options)
    return folder


def test_tokens_on_disk_give_the_batches_of_their_shards(
    corpus: Corpus, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("expert_threshold.data.loader.BLOCK_BYTES", 1000)  # several blocks
    stored = open_source(str(tokenized(corpus, tokenizer, tmp_path / "tokens")))
    assert (stored.hash, stored.sizes) == (corpus.hash, corpus.sizes)
    assert stored.tokenizer.hash == tokenizer.hash
    for split in corpus.sizes:
        assert list(stored.documents(split)) == list(corpus.documents(split))
    assert pack(stored, tokenizer, "validation").ids.tolist() == pack(corpus, tokenizer, "validation").ids.tolist()
    streamed = Loader(corpus.parts("train", tokenizer), 2, 32, seed=5)
    for _ in range(20):
        next(streamed)
    mapped = Loader(stored.parts("train", tokenizer), 2, 32, seed=5, position=streamed.position)
    for batch in islice(streamed, 40):
        assert torch.equal(torch.stack(next(mapped)), torch.stack(batch))
        assert mapped.position == streamed.position


def test_tokenizing_resumes_where_it_was_interrupted(corpus: Corpus, tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenized(corpus, tokenizer, tmp_path / "whole")

    def interrupt(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    out = tmp_path / "tokens"
    with pytest.raises(KeyboardInterrupt):
        tokenized(corpus, tokenizer, out, progress=interrupt)
    with pytest.raises(ValueError, match=f"{out} is not finished; resume with et data tokenize --out {out}"):
        open_source(str(out))
    made = {path: path.stat().st_mtime_ns for path in out.rglob("*.npz")}
    tokenized(corpus, tokenizer, out)
    assert made == {path: path.stat().st_mtime_ns for path in made} != {}
    assert content(out) == content(tmp_path / "whole")


def test_tokenizing_goes_on_after_a_full_disk(
    corpus: Corpus, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Tokenizer, path: Path) -> None:
        path.write_text("{")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "save", full)
        with pytest.raises(OSError, match="No space left"):
            tokenized(corpus, tokenizer, tmp_path / "tokens")
    assert open_source(str(tokenized(corpus, tokenizer, tmp_path / "tokens"))).hash == corpus.hash


def test_a_folder_of_other_tokens_is_left_alone(corpus: Corpus, tmp_path: Path, tokenizer: Tokenizer) -> None:
    out = tokenized(corpus, tokenizer, tmp_path / "tokens")
    with pytest.raises(ValueError, match=r"contains tokens of another text or tokenizer; use another --out"):
        tokenized(corpus, Tokenizer.train(TEXTS, 290), out)
    with pytest.raises(ValueError, match=r"already exists and is not a token folder; use another --out"):
        tokenized(corpus, tokenizer, tmp_path / "shards")
    stored = open_source(str(out))
    with pytest.raises(ValueError, match=r"was tokenized with a different tokenizer than this run's; pass the text"):
        stored.parts("train", Tokenizer.train(TEXTS, 290))


def test_damaged_token_files_are_named(corpus: Corpus, tmp_path: Path, tokenizer: Tokenizer) -> None:
    out = tokenized(corpus, tokenizer, tmp_path / "tokens")
    path = out / "train" / "000000.npz"
    whole = path.read_bytes()
    for damaged in (whole[:100] + bytes([whole[100] ^ 1]) + whole[101:], whole[:-1], b"", None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"^{path} is missing or damaged \(.*\); remove it and continue with"):
            list(open_source(str(out)).documents("train"))
    tokenized(corpus, tokenizer, out)
    assert path.read_bytes() == whole
    Tokenizer.train(TEXTS, 290).save(out / "tokenizer.json")
    with pytest.raises(ValueError, match=r"tokenizer.json is not the tokenizer of these tokens; restore the file"):
        open_source(str(out))
    (out / "tokens.json").write_text("[]")
    with pytest.raises(ValueError, match=rf"^{out} contains no tokens that this version can read; create them with et"):
        open_source(str(out))


# In memory.


def test_packing_opens_each_document_by_bos_and_counts_its_bytes(tmp_path: Path) -> None:
    texts = [f"Größe Nummer {number}\n" * (number + 1) for number in range(40)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8", newline="")
    corpus = open_source(str(tmp_path))
    tokenizer = Tokenizer.train(corpus.documents("train"), 270)
    seen = []
    tokens = pack(corpus, tokenizer, "train", lambda done, total: seen.append((done, total)))
    expected = list(corpus.documents("train"))
    documents = np.split(tokens.ids, tokens.offsets[1:-1])
    assert [tokenizer.decode(document[1:].tolist()) for document in documents] == expected
    assert {document[0] for document in documents} == {tokenizer.bos}
    assert tokens.documents == len(expected) == corpus.sizes["train"].documents
    assert tokens.bytes == sum(len(text.encode()) for text in expected) == tokenizer.token_bytes()[tokens.ids].sum()
    assert tokens.offsets.dtype == np.int64
    assert tokens.ids.dtype == np.uint16
    assert len(tokens) == tokens.offsets[-1]
    assert seen == [(tokens.bytes, tokens.bytes)]


def test_a_vocabulary_beyond_16_bits_is_packed_into_32(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text\n\n" * 2000, encoding="utf-8")
    corpus = open_source(str(tmp_path))
    pairs = [bytes([first, second]) for first in range(256) for second in range(256)]
    tokens = pack(corpus, Tokenizer([bytes([byte]) for byte in range(256)] + pairs), "train")
    assert tokens.ids.dtype == np.uint32
    assert tokens.ids[0] == 256 + 2**16

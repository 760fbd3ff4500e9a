"""Text that does not fit into memory: shards, blocks, ranks, resuming, damage, and tokens on disk."""

from __future__ import annotations

import dataclasses
import json
import threading
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import write_shards
from commands import content
from expert_threshold.data import IGNORED, Batch, Corpus, Loader, Position, Tokenizer, Tokens, open_source, pack
from expert_threshold.data.loader import Stream
from expert_threshold.data.token_files import write_tokens
from ranks import run_on_ranks

BOS = 9
TEXTS = [f"Document {number}: " + "größer, weiter, höher. " * (number % 7 + 1) for number in range(240)]


class Parts:
    """Parts in memory, of documents of these lengths; every id but the first of a document occurs once."""

    def __init__(self, parts: Sequence[Sequence[int]]) -> None:
        self.parts, next_id = [], 100
        for lengths in parts:
            offsets = np.cumsum([0, *lengths], dtype=np.int64)
            ids = np.arange(next_id, next_id + offsets[-1]).astype(np.uint16)
            ids[offsets[:-1]] = BOS
            next_id += len(ids)
            self.parts.append(Tokens(ids, offsets, bytes=4 * len(ids)))
        self.bytes = [part.bytes for part in self.parts]

    def read(self, part: int) -> Tokens:
        return self.parts[part]

    @property
    def ids(self) -> list[int]:
        return [i for part in self.parts for i in part.ids.tolist()]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several to a corpus of a few dozen tokens."""
    monkeypatch.setattr("expert_threshold.data.loader.BLOCK_BYTES", 60)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, 300)


@pytest.fixture
def corpus(tmp_path: Path) -> Any:
    return open_source(str(write_shards(tmp_path / "shards", TEXTS, 4, 16)))


def epoch_of(loader: Loader, epoch: int) -> list[int]:
    """The targets of one epoch of a loader of single rows that is at its beginning."""
    found: list[int] = []
    while loader.position.epoch == epoch:
        targets = next(loader).targets
        found += targets[targets != IGNORED].tolist()
    return found


def assert_equal(first: Batch, second: Batch) -> None:
    torch.testing.assert_close(first, second, rtol=0, atol=0)


FULL_PARTS = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=6), min_size=1, max_size=12).map(Parts)
PARTS = st.lists(st.lists(st.integers(1, 12), max_size=6), min_size=1, max_size=12).filter(any).map(Parts)
IN_MEMORY = FULL_PARTS.map(lambda parts: parts.parts[0]).filter(lambda tokens: len(tokens) > 6)
SEEDS = st.integers(0, 2**32)


@given(FULL_PARTS | IN_MEMORY, st.integers(1, 6), SEEDS, st.integers(1, 3))
def test_every_token_is_a_target_once_per_epoch(parts: Parts | Tokens, context: int, seed: int, threads: int) -> None:
    loader = Loader(parts, 1, context, seed, threads=threads)
    for epoch in range(3):
        assert Counter(epoch_of(loader, epoch)) == Counter(parts.ids)
    loader.close()


@given(PARTS | IN_MEMORY, st.integers(1, 4), st.integers(1, 6), SEEDS, st.integers(0, 20))
def test_resuming_is_going_on(parts: Parts | Tokens, batch_size: int, context: int, seed: int, batches: int) -> None:
    loader = Loader(parts, batch_size, context, seed)
    for _ in range(batches):
        next(loader)
    position = Position(**json.loads(json.dumps(dataclasses.asdict(loader.position))))
    resumed = Loader(parts, batch_size, context, seed, position=position, threads=2)
    for _ in range(5):
        assert_equal(next(resumed), next(loader))
        assert resumed.position == loader.position


@given(PARTS | IN_MEMORY, st.integers(1, 4), st.integers(1, 6), SEEDS, st.integers(2, 3))
def test_ranks_together_equal_one(parts: Parts | Tokens, batch_size: int, context: int, seed: int, ranks: int) -> None:
    whole = Loader(parts, ranks * batch_size, context, seed)
    each = [Loader(parts, batch_size, context, seed, rank, ranks) for rank in range(ranks)]
    for _ in range(5):
        joined = Batch(*map(torch.cat, zip(*map(next, each), strict=True)))
        assert_equal(joined, next(whole))
        assert {loader.position for loader in each} == {whole.position}


def test_ranks_that_share_the_reading_equal_one_and_fail_together(tmp_path: Path) -> None:
    run_on_ranks(Path(__file__).with_name("across_ranks.py"), 2, tmp_path)


def test_blocks_hold_parts_from_all_over_and_differ_from_epoch_to_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts([[5, 5, 5]] * 64)
    blocks = Stream(parts, seed=0)
    assert blocks.count(0) == blocks.count(1) == 64
    parts.bytes = [1] * 63 + [600]
    blocks = Stream(parts, seed=0)
    layout = blocks._layout(0)
    assert sorted(np.concatenate(layout).tolist()) == list(range(64))
    assert [part.tolist() for part in layout] != [part.tolist() for part in blocks._layout(1)]
    assert layout[0].tolist() != list(range(len(layout[0])))
    monkeypatch.undo()
    assert Stream(Parts([[5]] * 9), seed=0).count(0) == 1, "a small corpus is one block"


def test_threads_work_ahead_of_the_batches() -> None:
    class Slow(Parts):
        reading = threading.Semaphore(0)

        def read(self, part: int) -> Tokens:
            self.reading.release()
            return super().read(part)

    parts = Slow([[15]] * 30)
    loader = Loader(parts, 1, 15, seed=0)
    next(loader)
    for _ in range(3):  # the block in use and two more
        assert parts.reading.acquire(timeout=30)
    loader.close()


def test_a_position_outside_the_corpus_is_refused() -> None:
    parts = Parts([[5, 5]] * 12)
    for tokens in (parts, parts.parts[0]):
        for position in (Position(0, 0, 99), Position(0, 99, 0), Position(0, -1, 0), Position(-1, 0, 0)):
            with pytest.raises(ValueError, match="is not in this corpus; resume with the data that the run"):
                next(Loader(tokens, 1, 4, seed=0, position=position))


def test_a_corpus_of_nothing_but_empty_parts_ends() -> None:
    parts = Parts([[], []])
    parts.bytes = [10, 10]
    with pytest.raises(ValueError, match="this corpus contains no readable document"):
        next(Loader(parts, 1, 4, seed=0))


def test_memory_stays_flat_over_blocks_and_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Made(Parts):
        """4 MB in all, 200 kB a part, made anew each time."""

        bytes = (200_000,) * 20

        def __init__(self) -> None:
            pass

        def read(self, part: int) -> Tokens:
            return Tokens(np.zeros(100_000, np.uint16), np.arange(0, 100_001, 1000), 200_000)

    monkeypatch.setattr("expert_threshold.data.loader.BLOCK_BYTES", 400_000)
    loader = Loader(Made(), 8, 1000, seed=0)
    tracemalloc.start()
    try:
        peaks = []
        for _ in range(3):
            while loader.position.epoch % 2 == len(peaks) % 2:
                next(loader)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.reset_peak()
    finally:
        tracemalloc.stop()
    loader.close()
    # This block, those ahead, one batch: not the corpus, nor more with every epoch.
    assert max(peaks) < 3_500_000


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


def test_streaming_shards_meets_every_document_and_resumes(corpus: Corpus, tokenizer: Tokenizer) -> None:
    parts = corpus.parts("train", tokenizer)
    loader = Loader(parts, 1, 32, seed=3, threads=2)
    everything = pack(corpus, tokenizer, "train")
    assert Counter(epoch_of(loader, 0)) == Counter(everything.ids.tolist())
    next(loader)
    assert loader.position.epoch == 1
    again = Loader(parts, 1, 32, seed=3, position=loader.position)
    assert_equal(next(again), next(loader))


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


def test_tokens_on_disk_give_the_batches_of_their_shards(corpus: Corpus, tmp_path: Path, tokenizer: Tokenizer) -> None:
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
        assert_equal(next(mapped), batch)
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

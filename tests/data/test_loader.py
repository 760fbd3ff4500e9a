"""Batches of packed documents: every token once an epoch, resuming, ranks, blocks of a split in parts, and windows."""

from __future__ import annotations

import dataclasses
import json
import threading
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expert_threshold.data import IGNORED, Batch, Loader, Position, Tokens, windows
from expert_threshold.data.loader import Stream, rows_per_epoch
from ranks import run_on_ranks

BOS = 9


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


def tokens_of(lengths: Sequence[int]) -> Tokens:
    return Parts([lengths]).parts[0]


def epoch_of(loader: Loader, epoch: int) -> list[int]:
    """The targets of one epoch of a loader of single rows that is at its beginning."""
    found: list[int] = []
    while loader.position.epoch == epoch:
        targets = next(loader).targets
        found += targets[targets != IGNORED].tolist()
    return found


def assert_equal(first: Batch, second: Batch) -> None:
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def followers(tokens: Tokens) -> set[tuple[int, int]]:
    """The pairs of a token and what may follow it: the next one of its document, or the opening of any other."""
    return {*pairwise(tokens.ids.tolist()), *((end, BOS) for end in tokens.ids[tokens.offsets[1:] - 1].tolist())}


FULL_PARTS = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=6), min_size=1, max_size=12).map(Parts)
PARTS = st.lists(st.lists(st.integers(1, 12), max_size=6), min_size=1, max_size=12).filter(any).map(Parts)
IN_MEMORY = st.lists(st.integers(1, 12), min_size=1, max_size=12).map(tokens_of).filter(lambda tokens: len(tokens) > 6)
SEEDS = st.integers(0, 2**32)


@given(FULL_PARTS | IN_MEMORY, st.integers(1, 6), SEEDS, st.integers(1, 3))
def test_every_token_is_a_target_once_per_epoch(parts: Parts | Tokens, context: int, seed: int, threads: int) -> None:
    loader = Loader(parts, 1, context, seed, threads=threads)
    for epoch in range(3):
        assert Counter(epoch_of(loader, epoch)) == Counter(parts.ids)


@given(PARTS | IN_MEMORY, st.integers(1, 4), st.integers(1, 6), SEEDS, st.integers(0, 20))
def test_resuming_is_going_on(parts: Parts | Tokens, batch_size: int, context: int, seed: int, batches: int) -> None:
    loader = Loader(parts, batch_size, context, seed)
    for _ in range(batches):
        next(loader)
    position = Position(**json.loads(json.dumps(dataclasses.asdict(loader.position))))
    following = [(next(loader), loader.position) for _ in range(5)]
    resumed = Loader(parts, batch_size, context, seed, position=position, threads=2)
    loader.seek(position)
    for batch, place in following:
        for each in (resumed, loader):
            assert_equal(next(each), batch)
            assert each.position == place


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


@given(IN_MEMORY, st.integers(1, 4), st.integers(1, 6), SEEDS)
def test_a_target_is_what_follows_in_its_document_or_opens_the_next(
    tokens: Tokens, batch_size: int, context: int, seed: int
) -> None:
    for batch in islice(Loader(tokens, batch_size, context, seed), 10):
        known = batch.targets[:, :-1] != IGNORED
        assert torch.equal(batch.tokens[:, 1:][known], batch.targets[:, :-1][known])
        pairs = zip(batch.tokens.flatten().tolist(), batch.targets.flatten().tolist(), strict=True)
        assert {pair for pair in pairs if pair[1] != IGNORED} <= followers(tokens)


@given(IN_MEMORY, st.integers(1, 6), SEEDS)
def test_the_last_row_is_filled_up_with_tokens_of_the_text(tokens: Tokens, context: int, seed: int) -> None:
    """Zeros were routed with the rest, took places in the experts' k, and moved the cutoffs."""
    rows = list(islice(Loader(tokens, 1, context, seed), rows_per_epoch(tokens, context)))
    last = min(rows, key=lambda row: int((row.targets != IGNORED).sum()))
    beyond = rows_per_epoch(tokens, context) * context - len(tokens)
    assert int((last.targets == IGNORED).sum()) == beyond
    if beyond:
        assert last.tokens[0, -beyond] == BOS
        assert set(last.tokens.flatten().tolist()) <= set(tokens.ids.tolist())
        assert set(pairwise(last.tokens.flatten().tolist())) <= followers(tokens)


def test_a_batch_holds_rows_from_all_over_a_long_document() -> None:
    """Rows in the order of the stream made batches of one document each, and models learned far more slowly."""
    batch = next(Loader(tokens_of([64 * 8 * 4]), batch_size=8, context=8, seed=0))
    firsts = batch.tokens[:, 0]
    assert (firsts.diff().abs() > 8).all()
    assert firsts.max() - firsts.min() > 64 * 8


def test_epochs_and_seeds_differ_in_the_order_of_rows_and_documents() -> None:
    tokens = tokens_of([5] * 40)
    loader = Loader(tokens, 1, 5, seed=0)
    first, second = epoch_of(loader, 0), epoch_of(loader, 1)
    assert first != second
    assert first != tokens.ids.tolist()
    assert epoch_of(Loader(tokens, 1, 5, seed=1), 0) != first


def test_order_of_documents_is_the_same_on_every_machine() -> None:
    """Runs resume by their seed and position alone, so the order must never change."""
    assert epoch_of(Loader(tokens_of([2] * 6), 1, 2, seed=7), 0)[::2] == [103, 109, 101, 111, 107, 105]


def test_fewer_tokens_than_a_row_needs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"context=8 needs at least 9 tokens of text, but there are only 8; provide"):
        Loader(tokens_of([4, 4]), 1, 8, seed=0)
    tokens, targets = next(Loader(tokens_of([4, 5]), 4, 8, seed=0))
    assert tokens.shape == targets.shape == (4, 8)
    assert tokens.dtype == targets.dtype == torch.int64


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
    pool = loader._blocks._pool
    del loader  # which `close` does, too
    with pytest.raises(RuntimeError, match="shutdown"):
        pool.submit(int)


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
        """4 MB in parts of 200 kB, which are created for each call."""

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
    # This block, those ahead, one batch: not the corpus, nor more with every epoch.
    assert max(peaks) < 3_500_000


@given(IN_MEMORY, st.integers(1, 20))
def test_windows_contain_every_token_but_the_first_once_as_a_target(tokens: Tokens, context: int) -> None:
    found = list(windows(tokens, context))
    targets = [target for window in found for target in window.targets.tolist()]
    kept = [target for target in targets if target != IGNORED]
    assert kept == tokens.ids[1:].tolist()
    assert targets[: len(kept)] == kept
    assert len(targets) - len(kept) < context
    assert all(window.tokens.shape == window.targets.shape == (context,) for window in found)
    assert [token for window in found for token in window.tokens.tolist()][: len(kept)] == tokens.ids[:-1].tolist()

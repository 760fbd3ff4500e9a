from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expert_threshold.data import IGNORED, Loader, Tokenizer, Tokens, open_source, pack, windows
from expert_threshold.data.loader import rows_per_epoch

BOS = 9


def tokens_of(lengths: Sequence[int]) -> Tokens:
    """Documents of these lengths; every id but the first of each document occurs once."""
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    ids = np.arange(100, 100 + offsets[-1]).astype(np.uint16)
    ids[offsets[:-1]] = BOS
    return Tokens(ids, offsets, bytes=0)


def targets_of(loader: Loader, rows: int) -> list[int]:
    """The targets of the next rows of a loader of single rows, those that are ignored left out."""
    targets = torch.cat([batch.targets.flatten() for batch in islice(loader, rows)])
    return targets[targets != IGNORED].tolist()


def followers(tokens: Tokens) -> set[tuple[int, int]]:
    """The pairs of a token and what may follow it: the next one of its document, or the opening of any other."""
    return {*pairwise(tokens.ids.tolist()), *((end, BOS) for end in tokens.ids[tokens.offsets[1:] - 1].tolist())}


CORPORA = st.lists(st.integers(1, 12), min_size=1, max_size=12).map(tokens_of)
SEEDS = st.integers(0, 2**32)


def draw_loader_arguments(data: st.DataObject) -> tuple[Tokens, int, int, int]:
    tokens = data.draw(CORPORA.filter(lambda tokens: len(tokens) > 1))
    return tokens, data.draw(st.integers(1, 4)), data.draw(st.integers(1, min(6, len(tokens) - 1))), data.draw(SEEDS)


@given(st.data(), st.integers(0, 5), st.integers(0, 5))
def test_a_loader_goes_on_wherever_it_is_sent(data: st.DataObject, first: int, last: int) -> None:
    loader = Loader(*draw_loader_arguments(data))
    places, batches = zip(*[(loader.position, next(loader)) for _ in range(6)], strict=True)
    for place in (first, last):
        loader.seek(places[place])
        assert loader.position == places[place]
        for found, expected in zip(islice(loader, 2), batches[place:], strict=False):
            assert torch.equal(found.targets, expected.targets)


@given(st.data())
def test_a_target_is_what_follows_in_its_document_or_opens_the_next(data: st.DataObject) -> None:
    tokens, batch_size, context, seed = draw_loader_arguments(data)
    for batch in islice(Loader(tokens, batch_size, context, seed), 10):
        known = batch.targets[:, :-1] != IGNORED
        assert torch.equal(batch.tokens[:, 1:][known], batch.targets[:, :-1][known])
        pairs = zip(batch.tokens.flatten().tolist(), batch.targets.flatten().tolist(), strict=True)
        assert {pair for pair in pairs if pair[1] != IGNORED} <= followers(tokens)


@given(st.data())
def test_the_last_row_is_filled_up_with_tokens_of_the_text(data: st.DataObject) -> None:
    """Zeros were routed with the rest, took places in the experts' k, and moved the cutoffs."""
    tokens, _, context, seed = draw_loader_arguments(data)
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
    first, second = targets_of(loader, 40), targets_of(loader, 40)
    assert first != second
    assert first != tokens.ids.tolist()
    assert targets_of(Loader(tokens, 1, 5, seed=1), 40) != first
    assert targets_of(Loader(tokens, 1, 5, seed=0), 40) == first


def test_order_of_documents_is_the_same_on_every_machine() -> None:
    """Runs resume by their seed and position alone, so the order must never change."""
    assert targets_of(Loader(tokens_of([2] * 6), 1, 2, seed=7), 6)[::2] == [103, 109, 101, 111, 107, 105]


def test_fewer_tokens_than_a_row_needs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"context=8 needs at least 9 tokens of text, but there are only 8; provide"):
        Loader(tokens_of([4, 4]), 1, 8, seed=0)
    tokens, targets = next(Loader(tokens_of([4, 5]), 4, 8, seed=0))
    assert tokens.shape == targets.shape == (4, 8)
    assert tokens.dtype == targets.dtype == torch.int64


@given(CORPORA, st.integers(1, 9))
def test_windows_contain_every_token_but_the_first_once_as_a_target(tokens: Tokens, context: int) -> None:
    found = list(windows(tokens, context))
    targets = [target for window in found for target in window.targets.tolist()]
    kept = [target for target in targets if target != IGNORED]
    assert kept == tokens.ids[1:].tolist()
    assert targets[: len(kept)] == kept
    assert len(targets) - len(kept) < context
    assert all(window.tokens.shape == window.targets.shape == (context,) for window in found)
    assert [token for window in found for token in window.tokens.tolist()][: len(kept)] == tokens.ids[:-1].tolist()


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

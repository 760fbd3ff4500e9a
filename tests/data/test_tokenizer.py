from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import rustbpe
from hypothesis import given
from hypothesis import strategies as st

from commands import edit
from expert_threshold.data import Tokenizer
from expert_threshold.data.tokenizer import PATTERN

TEXT = [Path(json.__file__).read_text(encoding="utf-8"), "Ein paar Sätze, ein paar Wörter: größer, weiter, höher. " * 9]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXT, 512)


# Characters that the split pattern treats apart, in every mixture; st.text() alone seldom puts two of them together.
_MIXTURES = st.text(st.sampled_from("aÅ漢 \t\n\r\x0b\x85\u00a0\u2028'sS12½-<|>_é\u0301\u200d😀\0"))


@given(st.one_of(st.text(), _MIXTURES))
def test_decoding_undoes_encoding_for_any_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert tokenizer.encode_batch([text, "x", text]) == [ids, tokenizer.encode("x"), ids]


@pytest.mark.parametrize("text", [" ", "\n", "\t ", " \n", "a", "-", "0"])
def test_a_million_equal_characters_are_encoded(tokenizer: Tokenizer, text: str) -> None:
    """A stack overflow in the matcher used to end the process on long runs of blanks."""
    ids = tokenizer.encode(text * 1_000_000)
    assert tokenizer.decode_bytes(ids) == (text * 1_000_000).encode()
    if text == " ":
        assert Tokenizer.train([text * 1_000_000], 260).encode(text * 8) == [258]


def test_training_is_deterministic_and_order_of_texts_does_not_matter() -> None:
    first, second = Tokenizer.train(TEXT, 400), Tokenizer.train(reversed(TEXT), 400)
    assert [first.decode_bytes([i]) for i in range(400)] == [second.decode_bytes([i]) for i in range(400)]


def test_bos_is_the_last_id_and_no_text_encodes_to_it(tokenizer: Tokenizer) -> None:
    assert tokenizer.bos == tokenizer.vocab_size - 1 == 511
    ids = tokenizer.encode("<|bos|>")
    assert tokenizer.bos not in ids
    assert tokenizer.decode(ids) == tokenizer.decode([tokenizer.bos]) == "<|bos|>"
    assert tokenizer.token_bytes()[tokenizer.bos] == 0
    assert tokenizer.token_bytes().shape == (tokenizer.vocab_size,)
    assert tokenizer.decode_bytes(list("漢".encode())[:2]) == "漢".encode()[:2]
    assert tokenizer.decode(list("漢".encode())[:2]) == "\ufffd", "a character cut in two is shown as replaced"


def test_a_vocabulary_holds_the_bytes_and_no_more_than_the_text_supports() -> None:
    """9,999,999 tokens of the embedded text were refused only after 49 seconds of merging."""
    assert Tokenizer.train(TEXT, 257).encode("né") == list("né".encode())
    assert Tokenizer.train(["abab"], 259).vocab_size == 259
    with pytest.raises(ValueError, match=r"vocab_size=256 is too small; use at least 257"):
        Tokenizer.train(TEXT, 256)
    with pytest.raises(ValueError, match=r"vocab_size=260 is too large for this text, which supports at most 259;"):
        Tokenizer.train(["abab"], 260)
    with pytest.raises(ValueError, match=r"vocab_size=9999999 is too large; use at most 1048576"):
        Tokenizer.train(iter(lambda: 1 / 0, ""), 9_999_999)


@given(st.lists(_MIXTURES, max_size=5))
def test_no_vocabulary_that_a_text_supports_is_refused(texts: list[str]) -> None:
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(texts), 5000, pattern=PATTERN)
    largest = len(trainer.get_mergeable_ranks()) + 1
    assert Tokenizer.train(texts, largest).vocab_size == largest


def test_a_file_that_cannot_be_written_is_named(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "tokenizer.json"))):
        tokenizer.save(tmp_path / "tokenizer.json")


def test_loading_undoes_saving(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    loaded = Tokenizer.load(path)
    assert loaded.vocab_size == tokenizer.vocab_size
    assert loaded.encode_batch(TEXT) == tokenizer.encode_batch(TEXT)
    np.testing.assert_array_equal(loaded.token_bytes(), tokenizer.token_bytes())
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["model"]["merges"].pop(),
        lambda content: content["model"]["merges"].reverse(),
        lambda content: content["model"]["vocab"].update({"more": 9999}),
        lambda content: content.update(normalizer={"type": "NFC"}),
        lambda content: content["pre_tokenizer"]["pretokenizers"].clear(),
        lambda content: content.update(model=None),
        lambda content: content.update(model={"type": "BPE"}),
    ],
)
def test_another_encoding_is_refused(change: Callable[[Any], object], tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    with edit(tmp_path / "tokenizer.json") as content:
        change(content)
    with pytest.raises(ValueError, match=rf"{tmp_path}/tokenizer.json is damaged or is not a supported tokenizer"):
        Tokenizer.load(tmp_path / "tokenizer.json")


def test_a_damaged_tokenizer_file_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    content = path.read_bytes()
    swapped = content.replace(b'"th"', b'"ht"'), content.replace(b"[sdmt]", b"[sdm]")
    for data in (content[: len(content) // 2], b"[1, 2]", b"[" * 100_000, b"\xff\xfe\x00", *swapped):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"{path} is damaged or is not a supported tokenizer"):
            Tokenizer.load(path)

"""tokenizer.json for Hugging Face's `tokenizers`: it encodes and decodes exactly as ours."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from expert_threshold.data import BOS, Tokenizer
from expert_threshold.data.tokenizer import PATTERN
from expert_threshold.data.tokenizer_json import from_tokenizer_json, to_tokenizer_json

tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers: pip install -e '.[hf]'")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    # Runs of equal letters and overlapping words make merges compete for the same characters.
    chance = random.Random(0)
    words = ["".join(chance.choices("ab", k=chance.randint(1, 12))) for _ in range(400)]
    texts = [Path(json.__file__).read_text(encoding="utf-8"), " ".join(words), "größer, weiter, höher <|bos|> " * 9]
    return Tokenizer.train(texts, 700)


@pytest.fixture(scope="module")
def theirs(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    tokenizer.save(path)
    return tokenizers.Tokenizer.from_file(str(path))


_BYTES = st.binary(max_size=40)
_MIXTURES = st.text(st.sampled_from("abaab Å漢 \t\n\r\x0b\x85\u00a0\u2028'sSſ12½-<|bos>_é\u0301\u200d😀\0\ufb06")).map(
    str.encode
)
_WITH_BOS = st.lists(st.sampled_from([BOS, "<|", "bos", "|>", " ", "a"])).map(lambda parts: "".join(parts).encode())


@given(st.one_of(_BYTES, _MIXTURES, _WITH_BOS))
@example(b"aaa" * 99)
@example(b"<|bos|><|bos|>")
@example(b" " * 1_000_000)
def test_every_byte_string_is_encoded_as_by_our_tokenizer(tokenizer: Tokenizer, theirs: Any, content: bytes) -> None:
    text = content.decode(errors="replace")
    ids = theirs.encode(text, add_special_tokens=False).ids
    assert ids == tokenizer.encode(text)
    assert theirs.decode(ids, skip_special_tokens=False) == text
    assert theirs.encode(text).ids == [tokenizer.bos, *ids]  # a text opens a document


@given(st.one_of(_BYTES.map(list), st.lists(st.integers(0, 699))))
def test_every_list_of_ids_is_decoded_as_by_our_tokenizer(tokenizer: Tokenizer, theirs: Any, ids: list[int]) -> None:
    """Ids 0 to 255 are the bytes, so that these are all byte strings, valid or cut in the middle of a character."""
    assert theirs.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids)


def test_characters_are_of_the_same_class_in_both_matchers(theirs: Any) -> None:
    """Letters, digits and blanks decide where text is cut. A sample here, every character under `make soak`."""
    assert differences(random.Random(0).sample(range(0x110000), 3000)) == []


@pytest.mark.soak
def test_all_characters_are_of_the_same_class_in_both_matchers() -> None:
    for start in range(0, 0x110000, 0x1000):
        assert differences(range(start, start + 0x1000)) == []


def differences(codes: Any) -> list[str]:
    """Texts of a character after one of each class that the two cut otherwise, by merges that show where they cut."""
    leads = "a1\n-'"
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [lead.encode() + bytes([byte]) for lead in leads for byte in range(256)]
    ours = Tokenizer(tokens)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(to_tokenizer_json(tokens, PATTERN, BOS)))
    characters = [chr(code) for code in codes if not 0xD800 <= code < 0xE000]
    texts = [lead + character for character in characters for lead in leads]
    texts += [text for character in characters for text in (f"'{character}l", f"'l{character}")]
    encodings = theirs.encode_batch(texts, add_special_tokens=False)
    return [text for text, encoding in zip(texts, encodings, strict=True) if encoding.ids != ours.encode(text)]


def test_loading_gives_our_tokenizer_back(tokenizer: Tokenizer, theirs: Any, tmp_path: Path) -> None:
    theirs.save(str(tmp_path / "tokenizer.json"))  # as transformers writes it
    assert Tokenizer.load(tmp_path / "tokenizer.json").hash == tokenizer.hash


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize("like", ["GPT-2", "Llama 3"])
def test_another_byte_level_bpe_cuts_text_as_it_did_and_is_saved_as_ours(like: str, tmp_path: Path) -> None:
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

    theirs = tokenizers.Tokenizer(models.BPE(ignore_merges=like == "Llama 3"))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=like == "GPT-2")
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    theirs.pre_tokenizer = whole if like == "GPT-2" else pre_tokenizers.Sequence([split, whole])
    theirs.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    theirs.train_from_iterator([Path(random.__file__).read_text(encoding="utf-8")], trainer)
    theirs.save(str(tmp_path / "theirs.json"))
    ours = Tokenizer.load(tmp_path / "theirs.json")
    ours.save(tmp_path / "ours.json")
    again = Tokenizer.load(tmp_path / "ours.json")
    assert again.hash == ours.hash
    for text in (Path(json.__file__).read_text(encoding="utf-8"), "I'LL  pay 12345 €\n\n ñandú's\t<|endoftext|>"):
        pieces = [theirs.decode([i]) for i in theirs.encode(text, add_special_tokens=False).ids if i != 0]
        assert [ours.decode([i]) for i in ours.encode(text.replace("<|endoftext|>", ""))] == pieces
        assert again.encode(text) == ours.encode(text)


def test_merges_that_meet_in_the_middle_are_refused() -> None:
    """By pairs "abcd" is a, bc, d; by ranks it would be one token."""
    content = to_tokenizer_json([bytes([byte]) for byte in range(256)], PATTERN, BOS)
    content["post_processor"], vocab = None, content["model"]["vocab"]
    del vocab[BOS]
    for merge in ("b c", "a b", "c d", "ab cd"):
        content["model"]["merges"].append(merge.split())
        vocab[merge.replace(" ", "")] = len(vocab)
    with pytest.raises(ValueError, match="is not a merge of two earlier tokens"):
        from_tokenizer_json(content, BOS)


def test_a_vocabulary_that_no_merges_lead_to_is_refused() -> None:
    tokens = [bytes([byte]) for byte in range(256)]
    with pytest.raises(ValueError, match=r"token 256, b'abc', is not a merge of two earlier tokens"):
        to_tokenizer_json([*tokens, b"abc"], PATTERN, BOS)
    with pytest.raises(ValueError, match="two tokens are equal, or one of them is"):
        to_tokenizer_json([*tokens, b"a"], PATTERN, BOS)

"""Our tokenizer as the file `tokenizer.json` that Hugging Face's `tokenizers` reads, and back; neither needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any


def to_tokenizer_json(tokens: Sequence[bytes], pattern: str, bos: str) -> dict[str, Any]:
    """The content of a `tokenizer.json` that encodes and decodes exactly as ours does; the id of `bos` is the last.

    `bos` stands in the vocabulary, where no merge leads to it, and not among the added tokens, which are cut out of
    text: a text that reads "<|bos|>" stays ordinary. Special tokens are added as our models want them: `bos` in front.
    Raises ValueError if a token is not the merge of two tokens before it.
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    vocab = {_show(token): rank for token, rank in ranks.items()} | {bos: len(tokens)}
    if len(vocab) != len(tokens) + 1:
        raise ValueError(f"tokens are not all different, or one reads {bos}; train the tokenizer")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    opening, first, second = {"SpecialToken": {"id": bos, "type_id": 0}}, _sequence("A", 0), _sequence("B", 1)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [opening, first],
            "pair": [opening, first, second],
            "special_tokens": {bos: {"id": bos, "ids": [len(tokens)], "tokens": [bos]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(map(_show, _halves(token, ranks))) for token in tokens[256:]],
        },
    }


def from_tokenizer_json(content: Mapping[str, Any], bos: str) -> tuple[list[bytes], str]:
    """Tokens and pattern of such a file, also after Hugging Face has loaded and saved it again.

    Raises ValueError if it is not one of ours, or encodes otherwise.
    """
    try:
        model, pattern = content["model"], content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
        shown = {rank: token for token, rank in model["vocab"].items()}
        tokens = [bytes(_BYTES[character] for character in shown[rank]) for rank in range(len(shown) - 1)]
        expected = to_tokenizer_json(tokens, pattern, bos)
        same = all(content[part] == expected[part] for part in ("normalizer", "pre_tokenizer", "decoder", "model"))
    except (KeyError, IndexError, TypeError, AttributeError):
        same = False
    if not same:
        raise ValueError("it encodes otherwise than one that et export writes; export the run again")
    return tokens, pattern


def _sequence(name: str, type_id: int) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": type_id}}


def _halves(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """The two tokens that merge into `token`: what it is cut into by the merges before its own.

    Merging by pairs, as `tokenizers` does, then equals merging by results, as ours does: wherever tokens that make up
    `token` come to lie side by side, nothing outside has had a part in them, so that they are these two.
    """
    parts = [token[i : i + 1] for i in range(len(token))]
    while True:
        joined = [ranks.get(a + b, ranks[token]) for a, b in pairwise(parts)]
        lowest = min(joined)
        if lowest >= ranks[token]:
            break
        i = joined.index(lowest)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    if len(parts) != 2:
        raise ValueError(f"token {ranks[token]}, {token!r}, is no merge of two tokens before it; train the tokenizer")
    return parts


# Byte-level BPE writes bytes as printable characters: themselves, or those from U+0100 on where they are not printable.
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_CHARACTERS = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(256 + i) for i, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)
}
_BYTES = {character: byte for byte, character in _CHARACTERS.items()}


def _show(token: bytes) -> str:
    return "".join(_CHARACTERS[byte] for byte in token)

"""Converts our tokenizer to and from Hugging Face's `tokenizer.json`, without needing `tokenizers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any


def to_tokenizer_json(
    tokens: Sequence[bytes], pattern: str, bos: str, merges: Sequence[Sequence[str]] | None = None
) -> dict[str, Any]:
    """Return the content of a `tokenizer.json` that encodes and decodes exactly like ours; `bos` has the last id.

    `bos` is in the vocabulary, where no merge produces it, and not an added token, which would be matched in text:
    "<|bos|>" in a text stays ordinary. The post-processor puts `bos` in front, as our models need it.
    merges: known from a file; otherwise they are found, which takes seconds for 65,536 tokens. Raises ValueError if a
    token is not the merge of two tokens before it.
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
            "merges": merges or [list(map(_show, _halves(token, ranks))) for token in tokens[256:]],
        },
    }


def from_tokenizer_json(content: Mapping[str, Any], pattern: str, bos: str) -> list[bytes]:
    """Return the tokens of such a file, even if Hugging Face has loaded and saved it again.

    Raises ValueError if it encodes differently.
    """
    try:
        merges = content["model"]["merges"]
        shown = {rank: token for token, rank in content["model"]["vocab"].items()}
        tokens = [bytes(_BYTES[character] for character in shown[rank]) for rank in range(len(shown) - 1)]
        expected = to_tokenizer_json(tokens, pattern, bos, merges)
        same = all(content[part] == expected[part] for part in ("normalizer", "pre_tokenizer", "decoder", "model"))
        same &= [a + b for a, b in merges] == [shown[rank] for rank in range(256, len(tokens))]
    except (LookupError, TypeError, AttributeError):
        same = False
    if not same:
        raise ValueError("it encodes text differently")
    return tokens


def _sequence(name: str, type_id: int) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": type_id}}


def _halves(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """Return the two tokens that merge into `token`; where it can be cut in several ways, by applying earlier merges.

    Merging by pairs, as in `tokenizers`, then equals merging by results, as in ours: whenever adjacent tokens make up
    `token`, they were formed from its bytes alone, so they are these two.
    """
    own = ranks[token]
    halves = ([token[:cut], token[cut:]] for cut in range(1, len(token)))
    possible = [pair for pair in halves if all(ranks.get(half, own) < own for half in pair)]
    if len(possible) == 1:
        return possible[0]
    parts = [token[i : i + 1] for i in range(len(token))]
    while True:
        joined = [ranks.get(a + b, own) for a, b in pairwise(parts)]
        lowest = min(joined)
        if lowest >= own:
            break
        i = joined.index(lowest)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    if len(parts) != 2:
        raise ValueError(f"token {own}, {token!r}, is not a merge of two earlier tokens; train the tokenizer")
    return parts


# Byte-level BPE writes bytes as printable characters: themselves, or those from U+0100 on where they are not printable.
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_CHARACTERS = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(256 + i) for i, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)
}
_BYTES = {character: byte for byte, character in _CHARACTERS.items()}


def _show(token: bytes) -> str:
    return "".join(_CHARACTERS[byte] for byte in token)

"""Converts our tokenizer to and from Hugging Face's `tokenizer.json` without needing `tokenizers`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern with which ByteLevel splits text by default."""


def digest(tokens: Sequence[bytes], pattern: str) -> str:
    """Return a hexadecimal sha256 that is equal for tokenizers that encode identically."""
    found = hashlib.sha256(pattern.encode())
    for token in tokens:
        found.update(len(token).to_bytes(4, "little") + token)
    return found.hexdigest()


def to_tokenizer_json(tokens: Sequence[bytes], pattern: str, bos: str) -> dict[str, Any]:
    """Return the content of a `tokenizer.json` that encodes and decodes exactly like ours, with `bos` as the last id.

    `bos` is a vocabulary entry that no merge produces. If it were an added token, "<|bos|>" in a text would match it
    instead of being ordinary text. The post-processor prepends `bos`, as our models require.
    Raises ValueError if a token is not the merge of two earlier tokens.
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    vocab = {_show(token): rank for token, rank in ranks.items()} | {bos: len(tokens)}
    if len(vocab) != len(tokens) + 1:
        raise ValueError(f"two tokens are equal, or one of them is {bos}; train a new tokenizer")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    known = f"sha256 {digest(tokens, pattern)}"  # stored as an unused special token, since other keys would not be read
    special = {bos: {"id": bos, "ids": [len(tokens)], "tokens": [bos]}, known: {"id": known, "ids": [], "tokens": []}}
    opening = {"SpecialToken": {"id": bos, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    template = {"type": "TemplateProcessing", "single": [opening, first], "pair": [opening, first, second]}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": template | {"special_tokens": special},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
            **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
            "vocab": vocab,
            "merges": [list(map(_show, _halves(token, ranks))) for token in tokens[256:]],
        },
    }


def from_tokenizer_json(content: Mapping[str, Any], bos: str) -> tuple[list[bytes], str]:
    """Return the tokens and the pattern of a byte-level BPE, such as GPT-2's, Llama 3's or ours.

    The result splits text into the same tokens. If the tokenizer is not ours, its ids change, and its special tokens
    are dropped because no text encodes to them. Raises ValueError if our tokenizer would split text differently.
    """
    try:
        model, steps = content["model"], content["pre_tokenizer"]
        split, *rest = steps.get("pretokenizers", [steps])
        pattern = GPT2 if split["type"] == "ByteLevel" and split["use_regex"] else split["pattern"]["Regex"]
        merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
        results = [*dict.fromkeys(first + second for first, second in merges)]
        tokens = [bytes([byte]) for byte in range(256)] + [bytes(map(_BYTES.__getitem__, each)) for each in results]
        same = model["type"] == "BPE" and content["normalizer"] is None and content["decoder"]["type"] == "ByteLevel"
        same &= not any(model.get(rule) for rule in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
        same &= pattern == GPT2 or (split["behavior"] == "Isolated" and not split["invert"])
        same &= all(step["type"] == "ByteLevel" and not step["use_regex"] for step in rest)
        same &= not any(step.get("add_prefix_space") for step in (split, *rest))
        special = {bos} | {token["content"] for token in content["added_tokens"]}
        same &= model["vocab"].keys() - special == {_show(token) for token in tokens} - special
        if same and bos in model["vocab"]:  # our own tokenizer, whose ids a trained model depends on
            same = all(model["vocab"][name] == i for i, name in enumerate([*map(_show, tokens), bos]))
            if f"sha256 {digest(tokens, pattern)}" not in content["post_processor"]["special_tokens"]:
                raise ValueError("its content does not match its sha256")
        elif same and not _merges_alike(tokens, merges):
            raise ValueError("merging by rank, as this package does, would give different tokens")
    except (LookupError, TypeError, AttributeError):
        same = False
    if not same:
        raise ValueError("it must be a byte-level BPE that splits text in one step, without normalization")
    return tokens, pattern


def _merges_alike(tokens: Sequence[bytes], merges: Sequence[tuple[str, str]]) -> bool:
    """Return whether merging by the rank of the result, as we do, is equivalent to merging the pairs in order."""
    place, ranks = {pair: i for i, pair in enumerate(merges)}, {token: rank for rank, token in enumerate(tokens)}
    halves = [_halves(token, ranks, replayed=True) for token in tokens[256:]]
    found = [place.get((_show(first), _show(second)), -1) for first, second in halves]
    return all(found[i] > (found[i - 1] if i else -1) for i in range(len(found)))


def _halves(token: bytes, ranks: Mapping[bytes, int], *, replayed: bool = False) -> list[bytes]:
    """Return the two tokens that merge into `token`. If it can be split in several ways, earlier merges decide.

    This makes merging by pairs, as in `tokenizers`, equivalent to merging by results, as we do: whenever adjacent
    tokens make up `token`, they were formed from its bytes alone, so they are these two.
    """
    own = ranks[token]
    halves = ([token[:cut], token[cut:]] for cut in range(1, len(token)))
    possible = [pair for pair in halves if all(ranks.get(half, own) < own for half in pair)]
    if len(possible) == 1 and not replayed:
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
        raise ValueError(f"token {own}, {token!r}, is not a merge of two earlier tokens; train a new tokenizer")
    return parts


# Byte-level BPE represents each byte by a character: its own if it is printable, else one from U+0100 upwards.
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_CHARACTERS = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(256 + i) for i, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)
}
_BYTES = {character: byte for byte, character in _CHARACTERS.items()}


def _show(token: bytes) -> str:
    return "".join(_CHARACTERS[byte] for byte in token)

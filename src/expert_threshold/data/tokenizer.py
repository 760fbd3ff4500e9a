"""A byte-level BPE tokenizer. rustbpe learns the merges, and tiktoken applies them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tiktoken

from ..files import write_synced
from .tokenizer_json import digest, from_tokenizer_json, to_tokenizer_json

BOS = "<|bos|>"
MIN_VOCAB_SIZE = 257
"""The size of a vocabulary that contains only the 256 bytes and `BOS`."""
MAX_VOCAB_SIZE = 2**20
"""Several times the largest vocabulary in use, so that mistyped numbers are rejected immediately."""

# Text is split into pieces, and merges happen only within a piece. A piece is a contraction, a word with the character
# before it, up to two digits, or punctuation. As in GPT-4's pattern, the last space before a word belongs to the word.
# Unlike in GPT-4's pattern, a newline, or punctuation that ends a line, includes the following indentation, since both
# are common in source code. Runs are cut at 64 characters, since the matcher's stack overflows on a million spaces.
_NEWLINE = r"[\r\n]{1,16}(?:[^\S\r\n]{1,64}(?!\S))?"
PATTERN = "|".join(
    (
        r"'(?i:[sdmt]|ll|ve|re)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,2}",
        rf" ?[^\s\p{{L}}\p{{N}}]{{1,64}}(?:{_NEWLINE})?",
        _NEWLINE,
        r"\s{1,64}(?!\S)",
        r"\s{1,64}",
    )
)

THREADS = min(8, os.cpu_count() or 1)
"""The number of tokenizing threads when nothing else needs the processor."""


def require_vocab_size(vocab_size: int) -> None:
    """Raise ValueError if the vocabulary is too small for all bytes or larger than any text supports."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size={vocab_size} is too small; use at least {MIN_VOCAB_SIZE} (256 bytes and {BOS})")
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(f"vocab_size={vocab_size} is too large; use at most {MAX_VOCAB_SIZE}")


class Tokenizer:
    """Maps text to ids and back. Ids 0 to 255 are bytes, followed by merges in rank order and, finally, `BOS`.

    `tokens` contains the bytes of every id except `BOS`, which starts each document. No text encodes to `BOS`, since
    "<|bos|>" in a text is ordinary text.
    """

    def __init__(self, tokens: Sequence[bytes], pattern: str = PATTERN) -> None:
        self._tokens, self._pattern = tuple(tokens), pattern
        self._encoding = tiktoken.Encoding(
            "expert-threshold",
            pat_str=pattern,
            mergeable_ranks={token: rank for rank, token in enumerate(self._tokens)},
            special_tokens={BOS: self.bos},
        )

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Learn the `vocab_size - 257` most frequent merges. The order of the texts does not matter.

        Raises ValueError if `vocab_size` has no room for the bytes or exceeds what the text supports.
        """
        import rustbpe  # here, since everything else works on machines that lack it

        require_vocab_size(vocab_size)
        trainer = rustbpe.Tokenizer()
        trainer.train_from_iterator(iter(texts), vocab_size - 1, pattern=PATTERN)
        tokens = [bytes(token) for token, _ in sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])]
        if len(tokens) + 1 < vocab_size:
            raise ValueError(
                f"vocab_size={vocab_size} is too large for this text, which supports at most {len(tokens) + 1}; "
                "use a smaller vocab_size or more text"
            )
        return cls(tokens)

    @property
    def vocab_size(self) -> int:
        return len(self._tokens) + 1

    @property
    def hash(self) -> str:
        """A sha256, in hex, that is equal for tokenizers that encode identically."""
        return digest(self._tokens, self._pattern)

    @property
    def bos(self) -> int:
        """The id of `BOS`."""
        return len(self._tokens)

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def encode_array(self, text: str) -> npt.NDArray[np.uint32]:
        """Encode like `encode`, but release the GIL so that other threads can run."""
        return self._encoding.encode_to_numpy(text, disallowed_special=())

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Encode several texts in parallel threads."""
        return self._encoding.encode_ordinary_batch(texts, num_threads=THREADS)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text. Invalid UTF-8, such as part of a character, is replaced by U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the exact bytes. `bos` decodes to "<|bos|>"."""
        return self._encoding.decode_bytes(ids)

    def token_bytes(self) -> npt.NDArray[np.int32]:
        """Return the number of bytes that each id represents, of shape `(vocab,)`. It is 0 for `bos`."""
        return np.array([*map(len, self._tokens), 0], dtype=np.int32)

    def save(self, path: str | Path) -> None:
        """Write a `tokenizer.json` for Hugging Face's `tokenizers`, which then encodes and decodes identically."""
        content = to_tokenizer_json(self._tokens, self._pattern, BOS)
        write_synced(Path(path), (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Load a file written by `save`, or any byte-level BPE, whose ids then change. Raises ValueError otherwise."""
        try:
            return cls(*from_tokenizer_json(json.loads(Path(path).read_bytes()), BOS))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path} is damaged or is not a supported tokenizer ({error}); restore it from a backup, "
                "or train one with et data tokenizer"
            ) from None

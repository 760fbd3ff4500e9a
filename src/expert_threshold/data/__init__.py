"""Turns text into batches: corpora, a tokenizer, and a loader that packs documents."""

from .loader import IGNORED, Batch, Loader, Position, pack, windows
from .sources import Corpus, DataConfig, open_held_out, open_source
from .tokenizer import BOS, Tokenizer
from .tokens import Tokens

__all__ = [
    "BOS", "IGNORED", "Batch", "Corpus", "DataConfig", "Loader", "Position", "Tokenizer", "Tokens", "open_held_out",
    "open_source", "pack", "windows",
]  # fmt: skip

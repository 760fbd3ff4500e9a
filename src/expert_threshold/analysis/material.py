"""What figures are made of: the runs, and traces of their checkpoints over fixed token streams, kept on the disk."""

from __future__ import annotations

import hashlib
import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..data import IGNORED, Corpus, DataConfig, Tokenizer, Tokens, open_held_out, open_source, pack
from ..data.tokens import Ids
from ..model import GPT
from ..model.trace import Trace, record_trace
from ..runs import RunFolder, load_model
from ..runs.checkpoint import folder_of
from .methods import Selection, Subject, by_method

Progress = Callable[[str], Callable[[int, int], None]]
"""What is done -> a function that wants to be told how much of it, and of how much."""

Item = TypeVar("Item")

DOMAINS = {"code": "HumanEval", "math": "GSM8K"}
DOMAIN_FLAGS = ("--human-eval", "--gsm8k")
PASSAGE = 384
"""Tokens of a passage that is shown as text."""


class NotShownError(Exception):
    """A figure has no meaning for these runs, or lacks something; says why, without a full stop."""


class Streams(NamedTuple):
    """Sources of what is read. source: what all runs are traced on; None is each run's own validation split."""

    source: str | None
    tokens: int
    code: str | None  # HumanEval
    math: str | None  # GSM8K


class Material:
    """Runs and their traces. `folder` is where traces are kept: those of the same weights and tokens are used again."""

    def __init__(
        self,
        selection: Selection,
        folder: Path,
        streams: Streams,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress,
    ) -> None:
        self.selection = selection
        self.subjects = selection.subjects
        self.methods = by_method(selection.subjects)
        self.streams = streams
        self._folder = folder
        self._device, self._dtype = device, dtype
        self._progress = progress
        self._corpora: dict[str, Corpus] = {}
        self._tokens: dict[tuple[str, str], Tokens] = {}
        self._loaded: tuple[tuple[Path, int], tuple[GPT, Tokenizer]] | None = None

    @cached_property
    def compared(self) -> list[list[Subject]]:
        """The runs of each method, without those that switch the shared expert or the norm if there are others."""
        every = list(self.methods.values())
        return [runs for runs in every if runs[0].ordinary] or every

    @cached_property
    def first_runs(self) -> list[Subject]:
        """The first run of each method that is compared."""
        return [runs[0] for runs in self.compared]

    @cached_property
    def routed(self) -> list[Subject]:
        """Of these the ones with routed experts. Raises NotShownError if there is none."""
        found = [subject for subject in self.first_runs if subject.layers]
        if not found:
            raise NotShownError("no run has routed experts")
        return found

    @property
    def focus(self) -> Subject:
        """The run that figures of a single run show: with cutoffs rather than without, and causal in training."""
        return min(self.routed, key=lambda subject: (not subject.has_cutoffs, subject.rule.looks_ahead))

    def each(self, what: str, items: Sequence[Item]) -> Iterator[Item]:
        """The items, with progress told after each."""
        progress = self._progress(what)
        for done, item in enumerate(items, start=1):
            yield item
            progress(done, len(items))

    def trace(self, subject: Subject, stream: str = "validation", step: int | None = None) -> Trace:
        """Of a checkpoint, the last by default, over a stream: `validation`, `start` (its first quarter) or a domain.

        Raises ValueError if the run is damaged or its text is gone, NotShownError if no text of the domain was named.
        """
        context = subject.run.model.context
        tokens = max(self.streams.tokens // 4, 2) if stream == "start" else self.streams.tokens
        return self._trace(subject, stream, cut_windows(self._read(subject, stream).ids, context, tokens), step)

    def passages(self, subject: Subject) -> dict[str, tuple[Trace, list[str]]]:
        """Name -> the trace of the beginning of a document, and each of its tokens as text.

        One of each domain there is, else one of the validation split. bos, which opens a document, is no text.
        """
        streams = {DOMAINS[name]: name for name in DOMAINS if getattr(self.streams, name)}
        return {
            name: self._passage(subject, stream)
            for name, stream in (streams or {"validation text": "validation"}).items()
        }

    def _passage(self, subject: Subject, stream: str) -> tuple[Trace, list[str]]:
        read = self._read(subject, stream)
        ids = read.ids[: min(int(read.offsets[1]), PASSAGE)]
        windows = cut_windows(ids, subject.run.model.context, PASSAGE)
        trace = self._trace(subject, f"passage-{stream}", windows, None)
        tokenizer, decode = subject.folder.tokenizer(), getincrementaldecoder("utf-8")("replace").decode
        # A character of several tokens is the text of the last of them.
        return trace, [
            "" if token == tokenizer.bos else decode(tokenizer.decode_bytes([token])) for token in trace.tokens.tolist()
        ]

    def _read(self, subject: Subject, stream: str) -> Tokens:
        """The stream's first tokens by the run's tokenizer; read once for all checkpoints and all runs like it."""
        corpus, tokenizer = self._corpus(subject, stream), subject.folder.tokenizer()
        key = corpus.hash, tokenizer.hash
        if key not in self._tokens:
            # Windows need one token more, as the last target.
            told = self._progress(f"{corpus.name}: tokenizing")
            enough = self.streams.tokens + subject.run.model.context + 1
            self._tokens[key] = pack(corpus, tokenizer, "validation", told, max_tokens=enough)
        return self._tokens[key]

    def _corpus(self, subject: Subject, stream: str) -> Corpus:
        source = getattr(self.streams, stream) if stream in DOMAINS else self.streams.source
        if stream in DOMAINS and source is None:
            raise NotShownError(f"name the text of each domain: {' and '.join(DOMAIN_FLAGS)}")
        data = DataConfig(**subject.folder.section("data"))
        key = source or str(data)
        if key not in self._corpora:
            self._corpora[key] = open_held_out(source) if source else open_source(**asdict(data))
        corpus = self._corpora[key]
        if source is None and corpus.hash != subject.folder.section("corpus")["hash"]:
            raise ValueError(
                f"{corpus.name} has changed since {subject.folder.path} began; restore it, or name --data SOURCE"
            )
        return corpus

    def _trace(self, subject: Subject, stream: str, windows: Tensor, step: int | None) -> Trace:
        folder = subject.folder
        step = folder.checkpoints()[-1] if step is None else step
        facts = {
            "step": step,
            "checkpoint": _hash((folder_of(folder.path / "checkpoints", step) / "manifest.json").read_bytes()),
            "stream": _hash(windows.numpy().tobytes()),
            "dtype": str(self._dtype).removeprefix("torch."),
        }
        path = self._folder / f"{_slug(folder)}-step_{step:06d}-{stream}.parquet"
        if path.exists():
            with suppress(ValueError):  # a damaged one is recorded again
                kept = Trace(path)
                if kept.facts == facts:
                    return kept
        self._folder.mkdir(parents=True, exist_ok=True)
        model, _ = self._load(folder, step)
        what = f"{subject.method}: tracing {stream}, step {step:,}"
        return record_trace(model, windows, path, facts=facts, progress=self._progress(what))

    def _load(self, folder: RunFolder, step: int) -> tuple[GPT, Tokenizer]:
        """The model of a checkpoint; the last one is kept, since several streams follow each other."""
        if self._loaded is None or self._loaded[0] != (folder.path, step):
            self._loaded = None  # two models need not fit into memory
            self._loaded = (folder.path, step), load_model(folder.path, step, self._device, self._dtype)
        return self._loaded[1]


def cut_windows(ids: Ids, context: int, tokens: int) -> Tensor:
    """The first `tokens` ids as whole windows, (rows, context + 1) int32: each row's last is the next one's first.

    Fewer ids than a window make one that is shorter, whose last target is IGNORED.
    """
    rows = min(tokens, len(ids) - 1) // context
    if rows == 0:
        few = ids[:tokens].tolist()
        return torch.tensor([[*few, IGNORED]], dtype=torch.int32)
    stream = torch.from_numpy(ids[: rows * context + 1].astype(np.int32))
    return stream.unfold(0, context + 1, context).contiguous()


def _slug(folder: RunFolder) -> str:
    """A file name of the run's, which no other folder has."""
    path = folder.path.resolve()
    readable = re.sub(r"[^\w.-]+", "_", "-".join(path.parts[-2:]))
    return f"{readable}-{_hash(str(path).encode())[:6]}"


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

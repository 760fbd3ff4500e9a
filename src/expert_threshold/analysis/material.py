"""What figures are made of: the runs, and traces of their checkpoints over fixed token streams, kept on the disk."""

from __future__ import annotations

import hashlib
import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..data import IGNORED, Tokenizer, open_held_out, open_source
from ..model import GPT
from ..model.trace import Trace, record_trace
from ..runs import RunFolder, load_model
from ..runs.checkpoint import folder_of
from .methods import Subject, by_method

Progress = Callable[[str], Callable[[int, int], None]]
"""What is done -> a function that wants to be told how much of it, and of how much."""

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
        subjects: Sequence[Subject],
        folder: Path,
        streams: Streams,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress,
    ) -> None:
        self.subjects = subjects
        self.methods = by_method(subjects)
        self.streams = streams
        self._folder = folder
        self._device, self._dtype = device, dtype
        self._progress = progress
        self._texts: dict[Any, list[str]] = {}
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
        """The run that figures of a single run show: expert threshold before expert choice before token choice."""
        rules = ("expert_threshold", "expert_choice", "token_choice")
        return min(self.routed, key=lambda subject: rules.index(subject.run.rule["name"]))

    def trace(self, subject: Subject, stream: str = "validation", step: int | None = None) -> Trace:
        """Of a checkpoint, the last by default, over a stream: `validation`, `start` (its first quarter) or a domain.

        Raises ValueError if the run is damaged or its text is gone, NotShownError if no text of the domain was named.
        """
        return self._trace(subject, stream, self._texts_of(stream, subject), self._tokens(stream), step)

    def passage(self, subject: Subject, text: str) -> tuple[Trace, list[str]]:
        """The trace of the beginning of a text, opened as a document, and each of its tokens as text."""
        trace = self._trace(subject, f"passage-{_hash(text.encode())[:8]}", [text], PASSAGE, None)
        tokenizer, decode = subject.folder.tokenizer(), getincrementaldecoder("utf-8")("replace").decode
        # A character of several tokens is the text of the last of them.
        return trace, [
            "" if token == tokenizer.bos else decode(tokenizer.decode_bytes([token])) for token in trace.tokens.tolist()
        ]

    def passages(self, subject: Subject) -> dict[str, str]:
        """Name -> text of what is shown token by token: of each domain there is, or of the validation split."""
        named = {DOMAINS[name]: self._texts_of(name, subject)[0] for name in DOMAINS if getattr(self.streams, name)}
        return named or {"validation": next(iter(self._texts_of("start", subject)))}

    def _tokens(self, stream: str) -> int:
        return max(self.streams.tokens // 4, 1) if stream == "start" else self.streams.tokens

    def _texts_of(self, stream: str, subject: Subject) -> list[str]:
        """The beginning of what the stream is made of; read once for all runs."""
        if stream in DOMAINS:
            source = getattr(self.streams, stream)
            if source is None:
                raise NotShownError(f"name the text of each domain: {' and '.join(DOMAIN_FLAGS)}")
        else:
            source = self.streams.source
        data = subject.folder.section("data")
        key = (source,) if source else (data["source"], data["text_field"], data["validation_fraction"])
        if key not in self._texts:
            corpus = open_held_out(source) if source else open_source(*key)
            if source is None and corpus.hash != subject.folder.section("corpus")["hash"]:
                raise ValueError(
                    f"{corpus.name} has changed since {subject.folder.path} began; restore it, or name --data SOURCE"
                )
            self._texts[key] = _first(corpus.documents("validation"), 16 * self.streams.tokens)
        return self._texts[key]

    def _trace(self, subject: Subject, stream: str, texts: Iterable[str], tokens: int, step: int | None) -> Trace:
        folder = subject.folder
        step = folder.checkpoints()[-1] if step is None else step
        windows = cut_windows(texts, folder.tokenizer(), subject.run.model.context, tokens)
        facts = {
            "step": step,
            "checkpoint": _hash((folder_of(folder.path / "checkpoints", step) / "manifest.json").read_bytes()),
            "stream": _hash(windows.numpy().tobytes()),
            "dtype": str(self._dtype).removeprefix("torch."),
        }
        name = f"{_slug(folder)}-step_{step:06d}-{stream}.parquet"
        path = self._folder / name
        if path.exists():
            try:
                kept = Trace(path)
                if kept.facts == facts:
                    return kept
            except ValueError:
                pass  # a damaged one is recorded again
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


def cut_windows(texts: Iterable[str], tokenizer: Tokenizer, context: int, tokens: int) -> Tensor:
    """The first `tokens` of the texts, each opened by bos, as whole windows: (rows, context + 1) int32.

    Each row's last token is the next one's first. Fewer tokens than a window make one that is shorter.
    """
    wanted = max(tokens // context, 1) * context + 1 if tokens >= context else tokens + 1
    ids: list[int] = []
    for text in texts:
        if len(ids) >= wanted:
            break
        ids += [tokenizer.bos, *tokenizer.encode(text[: 16 * wanted])]
    ids = ids[:wanted]
    if len(ids) <= context:
        return torch.tensor([[*ids, IGNORED]] if len(ids) < wanted else [ids], dtype=torch.int32)
    rows = (len(ids) - 1) // context
    return torch.tensor(ids[: rows * context + 1], dtype=torch.int32).unfold(0, context + 1, context).contiguous()


def _first(texts: Iterable[str], characters: int) -> list[str]:
    """The texts of the beginning, so that a large corpus is not held whole: no token is longer than 16 characters on
    average."""
    found, size = [], 0
    for text in texts:
        if size >= characters:
            break
        found.append(text)
        size += len(text)
    return found


def _slug(folder: RunFolder) -> str:
    """A file name of the run's, which no other folder has."""
    path = folder.path.resolve()
    readable = re.sub(r"[^\w.-]+", "_", "-".join(path.parts[-2:]))
    return f"{readable}-{_hash(str(path).encode())[:6]}"


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

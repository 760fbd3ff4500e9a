"""Studies, the figures of `et analyze`, and their material: runs, and cached traces of their checkpoints on texts."""

from __future__ import annotations

import hashlib
import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from .. import __version__
from ..data import IGNORED, Corpus, DataConfig, Tokenizer, Tokens, open_held_out, open_source, pack
from ..data.tokens import Ids
from ..evaluation import Progress
from ..model import GPT
from ..model.trace import Trace, record_trace
from ..runs import RunFolder, load_model
from ..runs.checkpoint import folder_of
from .methods import Selection
from .plain import Data, NotShownError
from .records import Run
from .results import by_method

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Item = TypeVar("Item")

DOMAINS = {"code": "HumanEval", "math": "GSM8K"}
"""The paper's domains and the question sets that represent them."""
STREAMS = ("validation", "start")
"""The streams that every run has: its validation text, and the first quarter of it."""
PASSAGE = 384
"""The maximum number of tokens of a passage shown as text."""


class Domain(NamedTuple):
    """A text on which experts are compared. known_as: the name of the question set, or "" for a user's own text."""

    source: str
    known_as: str = ""


@dataclass
class Material:
    """Runs and their traces on texts. Traces are cached in `folder` for each checkpoint and stream."""

    selection: Selection
    folder: Path
    source: str | None  # the text on which all runs are traced; None: each run's own validation split
    tokens: int  # the number of tokens of a trace
    domains: Mapping[str, Domain]
    device: torch.device
    dtype: torch.dtype
    progress: Progress
    _corpora: dict[str, Corpus] = field(default_factory=dict)
    _tokens: dict[tuple[str, str], Tokens] = field(default_factory=dict)
    _loaded: tuple[tuple[Path, int], tuple[GPT, Tokenizer]] | None = None

    @property
    def runs(self) -> list[Run]:
        return self.selection.runs

    @cached_property
    def methods(self) -> dict[str, list[Run]]:
        """The runs of each method."""
        return by_method(self.runs)

    @cached_property
    def compared(self) -> list[list[Run]]:
        """The runs of each method. Ablations of the shared expert or the norm are included only if nothing else is."""
        every = list(self.methods.values())
        return [runs for runs in every if runs[0].model.shared_experts and not runs[0].model.gate_norm] or every

    @cached_property
    def first_runs(self) -> list[Run]:
        """The first run of each compared method."""
        return [runs[0] for runs in self.compared]

    @cached_property
    def routed(self) -> list[Run]:
        """The first run of each compared method with routed experts. Raises NotShownError if there is none."""
        found = [run for run in self.first_runs if run.layers]
        if not found:
            raise NotShownError("no run has routed experts")
        return found

    @property
    def focus(self) -> Run:
        """The run that figures of a single run show, preferably one with cutoffs, and best if trained causally."""
        return min(self.routed, key=lambda run: (not run.has_cutoffs, run.rule.looks_ahead))

    def each(self, what: str, items: Sequence[Item]) -> Iterator[Item]:
        """Yield the items, and report progress after each one."""
        progress = self.progress(what)
        for done, item in enumerate(items, start=1):
            yield item
            progress(done, len(items))

    def read_domains(self) -> None:
        """Open the text of every domain, so that errors appear early. Raises ValueError as `open_held_out` does."""
        for domain in self.domains.values():
            self._opened(domain.source, open_held_out)

    def trace(self, run: Run, stream: str = "validation", step: int | None = None) -> Trace:
        """Return the trace of a checkpoint, by default the last one, on a stream.

        stream: `validation`, its first quarter `start`, or a domain's name. Raises ValueError if the run is damaged or
        its text has changed.
        """
        context = run.model.context
        tokens = max(self.tokens // 4, 2) if stream == "start" else self.tokens
        return self._trace(run, stream, cut_windows(self._read(run, stream).ids, context, tokens), step)

    def passages(self, run: Run) -> dict[str, tuple[Trace, list[str]]]:
        """Return the trace of the start of a document and the string of each of its tokens, keyed by the text's name.

        There is one document for each domain, or one from the validation split without domains. BOS becomes "".
        """
        streams = {domain.known_as or name: name for name, domain in self.domains.items()}
        found, tokenizer = {}, run.folder.tokenizer()
        for name, stream in (streams or {"validation text": "validation"}).items():
            read = self._read(run, stream)
            windows = cut_windows(read.ids[: min(int(read.offsets[1]), PASSAGE)], run.model.context, PASSAGE)
            trace = self._trace(run, f"passage-{stream}", windows, None)
            # A character that is split over several tokens is assigned to the last one.
            decode = getincrementaldecoder("utf-8")("replace").decode
            ids = trace.tokens.tolist()
            found[name] = trace, ["" if id == tokenizer.bos else decode(tokenizer.decode_bytes([id])) for id in ids]
        return found

    def _read(self, run: Run, stream: str) -> Tokens:
        """Return the first tokens of the stream, encoded with the run's tokenizer and cached."""
        corpus, tokenizer = self._corpus(run, stream), run.folder.tokenizer()
        key = corpus.hash, tokenizer.hash
        if key not in self._tokens:
            enough = self.tokens + run.model.context + 1  # the last window needs one more token as its last target
            progress = self.progress(f"{corpus.name}: tokenizing")
            self._tokens[key] = pack(corpus, tokenizer, "validation", progress, max_tokens=enough)
        return self._tokens[key]

    def _corpus(self, run: Run, stream: str) -> Corpus:
        domain = self.domains.get(stream)
        source = self.source if domain is None else domain.source
        if source is not None:
            return self._opened(source, open_held_out)
        data = run.folder.section("data")
        corpus = self._opened(str(data), lambda _: open_source(**asdict(DataConfig(**data))))
        if corpus.hash != run.folder.section("corpus")["hash"]:
            raise ValueError(
                f"{corpus.name} has changed since {run.folder.path} was started; restore it, or use --data SOURCE"
            )
        return corpus

    def _opened(self, source: str, open_it: Callable[[str], Corpus]) -> Corpus:
        if source not in self._corpora:
            self._corpora[source] = open_it(source)
        return self._corpora[source]

    def _trace(self, run: Run, stream: str, windows: Tensor, step: int | None) -> Trace:
        folder = run.folder
        step = folder.checkpoints()[-1] if step is None else step
        facts = {
            "step": step,
            "expert_threshold": __version__,
            "model": _hash(repr(run.model).encode()),
            "checkpoint": _hash((folder_of(folder.path / "checkpoints", step) / "manifest.json").read_bytes()),
            "stream": _hash(windows.numpy().tobytes()),
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        place = folder.path.resolve()
        readable = re.sub(r"[^\w.-]+", "_", "-".join(place.parts[-2:]))
        path = self.folder / f"{readable}-{_hash(str(place).encode())[:6]}-step_{step:06d}-{stream}.parquet"
        if path.exists():
            with suppress(ValueError):  # a damaged trace is recorded again
                kept = Trace(path)
                if kept.facts == facts:
                    return kept
        self.folder.mkdir(parents=True, exist_ok=True)
        model, _ = self._load(folder, step)
        what = f"{run.method}: tracing {stream}, step {step:,}"
        return record_trace(model, windows, path, facts=facts, progress=self.progress(what))

    def _load(self, folder: RunFolder, step: int) -> tuple[GPT, Tokenizer]:
        """Load the model of a checkpoint. It stays loaded, since several streams are traced with it."""
        if self._loaded is None or self._loaded[0] != (folder.path, step):
            self._loaded = None  # free the old model first
            self._loaded = (folder.path, step), load_model(folder.path, step, self.device, self.dtype)
        return self._loaded[1]


def cut_windows(ids: Ids, context: int, tokens: int) -> Tensor:
    """Cut the first `tokens` ids into int32 windows (rows, context + 1); each row ends with the next row's first id.

    If there are fewer ids than a window needs, return one shorter window whose last target is IGNORED.
    """
    rows = min(tokens, len(ids) - 1) // context
    if rows == 0:
        few = ids[:tokens].tolist()
        return torch.tensor([[*few, IGNORED]], dtype=torch.int32)
    stream = torch.from_numpy(ids[: rows * context + 1].astype(np.int32))
    return stream.unfold(0, context + 1, context).contiguous()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Study(NamedTuple):
    """A figure. `compute` returns its data, or raises NotShownError if it does not apply; `draw` and `say` use it."""

    name: str  # base name of its files
    title: str
    compute: Callable[[Material], Data]
    draw: Callable[..., Figure]
    say: Callable[[Data], str]


def over_methods(runs: Iterable[Run], compute: Callable[[Run], Data]) -> dict[str, Any]:
    """Compute the data of each method. A NotShownError omits the method, or the figure if no method remains."""
    methods: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for run in runs:
        try:
            methods.append({**run.tag, **compute(run)})
        except NotShownError as reason:
            left_out[run.method] = str(reason)
    if not methods:
        raise NotShownError(next(iter(left_out.values())))
    return {"methods": methods, "left_out": left_out}


def of_each_method(compute: Callable[[Material, Run], Data]) -> Callable[[Material], dict[str, Any]]:
    """Turn a function of one run into the `compute` of a figure, for all methods with routed experts."""

    @wraps(compute)
    def of_all(material: Material) -> dict[str, Any]:
        runs = material.each(compute.__name__.replace("_", " "), material.routed)
        return over_methods(runs, partial(compute, material))

    return of_all

"""Audits a language model from text alone: how it uses its experts, and whether it is causal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ..data import Tokenizer
from ..evaluation import Progress
from ..model import GPT
from .causality import Check, Probe, forward, watched
from .measures import load_spread, mutual_information
from .plain import plain
from .sentences import counted, listed

ROWS, TIME = 4, 48
"""The shape of the batch on which causality is tested."""
LEAST = 16
"""The minimum number of tokens in a text."""
BATCH, WINDOW = 8, 512
"""The shape of the batches on which loads are measured; a shorter context shortens the windows."""
PAIRS, SHARED = 8, 5
"""The maximum number of listed pairs of experts, and the minimum number of tokens that a pair shares."""
CHANGES = {"neighbours": "neighbours in the batch", "chunks": "chunks of the prefill"}


class Layer(NamedTuple):
    """The use of a layer's experts."""

    router: str  # its name
    load: dict[str, list[int]]  # tokens of each expert, keyed by text
    spread: float  # largest load / mean load
    entropy: float  # of the loads; 1 if they are equal
    dead: list[int]  # experts without tokens
    fanout: float
    fanout_counts: list[int]  # tokens with each fanout
    drift: float  # change of mean scores between halves of a text, in standard deviations; root mean square of experts
    pairs: list[tuple[int, int, int, float]]  # two experts, their shared tokens, and the ratio to independent choices
    information: float  # bits that a token's expert reveals about the text


class Audit(NamedTuple):
    """The findings of an audit of one model."""

    model: str
    training: bool
    dtype: str  # the precision in which causality was tested
    tolerance: float
    checks: list[Check]
    layers: list[Layer]

    @property
    def leaks(self) -> bool:
        return any(check.changed for check in self.checks)

    @property
    def verdict(self) -> str:
        """A one-line summary."""
        leaks, held = [], []
        for check in self.checks:
            what = CHANGES.get(check.what, check.what)
            first = next((f", experts from {name} on" for name, positions in check.routers.items() if positions), "")
            if check.changed:
                of = f"{check.changed} of {check.positions} positions, logits by up to {check.largest:.2g}"
                leaks.append(f"{what} ({of}{first})")
            elif check.positions:
                held.append(what)
        parts = [f"LEAKS through {listed(leaks)}"] if leaks else []
        parts += [f"nothing changes with {listed(held)}"] if held else []
        parts += [f"{check.what} not judged ({check.reason})" for check in self.checks if check.reason]
        causal = f"{'not ' if leaks else ''}causal{' in training' if self.training else ''}"
        judged = f"[{self.dtype}, tolerance {self.tolerance:.1g}]"
        return f"{self.model}: {causal}: {'; '.join([*parts, self._loads()])} {judged}"

    def _loads(self) -> str:
        if not self.layers:
            return "no experts were found"
        worst, fanouts = max(layer.spread for layer in self.layers), [layer.fanout for layer in self.layers]
        return (
            f"{counted(len(self.layers), 'layer')} of {len(self.layers[0].fanout_counts) - 1} experts, fanout "
            f"{sum(fanouts) / len(fanouts):.2f}, largest load {worst:.2f} times the mean, "
            f"{counted(sum(len(layer.dead) for layer in self.layers), 'dead expert')}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the findings and the verdict as JSON-compatible types."""
        layers, checks = ([part._asdict() for part in parts] for parts in (self.layers, self.checks))
        facts = {"leaks": self.leaks, "verdict": self.verdict, **self._asdict()}
        return dict(plain(facts | {"checks": checks, "layers": layers}))


def audit(
    model: nn.Module,
    tokenizer: Any,
    texts: Mapping[str, Iterable[str]],
    *,
    tokens: int = 32_768,
    training: bool = False,
    name: str = "model",
    progress: Progress = lambda what: lambda done, total: None,
) -> Audit:
    """Audit a causal language model of this package or of transformers, and restore its training mode.

    tokenizer: encodes text into token ids. texts: the documents of each text, keyed by name. tokens: the number of
    tokens on which loads are measured, divided among the texts. training: route as in training, but without dropout.
    Raises ValueError if the model returns no logits, if its logits are random, or if a text is too short.
    """
    start = [tokenizer.bos] if isinstance(tokenizer, Tokenizer) else []
    ids: dict[str, Tensor] = {}
    for text, documents in texts.items():
        stream = (token for document in documents for token in (*start, *tokenizer.encode(document)))
        found = [*islice(stream, max(tokens // len(texts), LEAST))]
        if len(found) < LEAST:
            raise ValueError(f"{text} has {counted(len(found), 'token')}; at least {LEAST} are needed")
        ids[text] = torch.tensor(found, device=next(model.parameters()).device)
    first, context = torch.cat([*ids.values()]), _context(model)
    time = min(TIME, context, len(first) // ROWS)
    with _mode(model, first[None, :time], training):
        probe = Probe(model, first[: ROWS * time].view(ROWS, time))
        checks = probe.checks(progress("causality"))
        layers = measure(model, ids, context, progress("loads"))
    return Audit(name, training, str(probe.dtype).removeprefix("torch."), probe.tolerance, checks, layers)


def _context(model: nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    if isinstance(model, GPT):
        return min(model.config.context, WINDOW)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    known = (getattr(config, key, None) for key in ("max_position_embeddings", "n_positions", "max_seq_len"))
    return min([WINDOW, *(limit for limit in known if isinstance(limit, int) and limit > 0)])


@contextmanager
def _mode(model: nn.Module, tokens: Tensor, training: bool) -> Iterator[None]:
    """Put the model into evaluation mode. If `training`, put its MoE layers into training mode without dropout."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), watched(model) as found:
            forward(model, tokens)
        for name in found if training else ():
            for module in model.get_submodule(name.rpartition(".")[0]).modules():
                module.training = not isinstance(module, _DropoutNd)
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@torch.no_grad()
def measure(
    model: nn.Module,
    ids: Mapping[str, Tensor],
    context: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Layer]:
    """Measure how each layer with a router uses its experts. ids: token ids of each text, to be cut into windows."""
    sums: dict[str, _Sums] = {}
    texts = {}
    for text, tokens in ids.items():
        window = min(context, len(tokens))
        texts[text] = tokens[: len(tokens) // window * window].view(-1, window)
    batches = [(text, start) for text, rows in texts.items() for start in range(0, len(rows), BATCH)]
    for done, (text, start) in enumerate(batches, start=1):
        batch = texts[text][start : start + BATCH]
        late = 2 * (torch.arange(batch.numel()) + start * batch.shape[1]) >= texts[text].numel()
        with watched(model) as found:
            forward(model, batch)
        for router, ((scores, assignment), *_) in found.items():
            if len(assignment) == batch.numel():
                of_layer = sums.setdefault(router, _Sums(assignment.shape[1], ids))
                of_layer.add(text, scores.double().cpu(), assignment.cpu(), late)
        progress(done, len(batches))
    return [of_layer.layer(router) for router, of_layer in sums.items()]


class _Sums:
    """Sums over the tokens of one layer."""

    def __init__(self, experts: int, texts: Iterable[str]) -> None:
        self.load = {text: torch.zeros(experts, dtype=torch.int64) for text in texts}
        self.fanouts = torch.zeros(experts + 1, dtype=torch.int64)
        self.together = torch.zeros(experts, experts, dtype=torch.float64)
        self.moments = torch.zeros(3, 2, experts, dtype=torch.float64)  # powers 0 to 2 of scores, half, expert

    def add(self, text: str, scores: Tensor, assignment: Tensor, late: Tensor) -> None:
        """Add tokens of a text. late: (tokens,), True in the second half of the text."""
        self.load[text] += assignment.sum(0)
        self.fanouts += torch.bincount(assignment.sum(1), minlength=len(self.fanouts))
        self.together += assignment.double().T @ assignment.double()
        powers = torch.stack([scores**power for power in range(3)])
        self.moments += torch.stack([powers[:, ~late].sum(1), powers[:, late].sum(1)], 1)

    def layer(self, router: str) -> Layer:
        load = torch.stack([*self.load.values()])
        total, experts, tokens = load.sum(0), load.shape[1], int(self.fanouts.sum())
        shares = total / total.sum()
        pairs = torch.triu_indices(experts, experts, 1)
        shared = self.together[*pairs]
        lift = (shared * tokens / total[pairs].double().prod(0)).where(shared >= SHARED, 0)
        best = [pair for pair in lift.argsort(descending=True)[:PAIRS].tolist() if lift[pair] > 1]
        _, mean, square = self.moments.sum(1) / tokens
        moved = (self.moments[1] / self.moments[0]).diff(dim=0)[0].square() / (square - mean.square()).clamp(min=0)
        return Layer(
            router,
            {text: each.tolist() for text, each in self.load.items()},
            float(load_spread(total)),
            float(-torch.xlogy(shares, shares).sum() / math.log(experts)) if experts > 1 else 1.0,
            (total == 0).nonzero().flatten().tolist(),
            int(total.sum()) / tokens,
            self.fanouts.tolist(),
            float(moved.nan_to_num(posinf=0).mean().sqrt()),
            [(*pairs[:, pair].tolist(), int(shared[pair]), float(lift[pair])) for pair in best],
            float(mutual_information(load / load.sum(1, keepdim=True).clamp(min=1))),
        )

"""An audit of a language model from text alone: the use of its experts, and whether it is causal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ..data import Tokenizer
from ..evaluation import Progress
from ..model import GPT
from .causality import Check, Choice, Probe, forward, watched
from .measures import load_spread, mutual_information
from .plain import Data, plain
from .sentences import counted, listed

ROWS, TIME = 4, 48
"""The batch on which causality is judged."""
LEAST = 4 * ROWS
"""The fewest tokens of a text."""
BATCH, WINDOW = 8, 512
"""The batches in which loads are measured; a model with a shorter context has shorter windows."""
PAIRS, SEEN = 8, 5
"""Pairs of experts that are listed, of those that share at least so many tokens."""
CHANGES = {
    "later tokens": "later tokens",
    "neighbours": "neighbours in the batch",
    "padding": "padding",
    "chunks": "chunks of the prefill",
}


class Encodes(Protocol):
    def encode(self, text: str) -> list[int]: ...


class Layer(NamedTuple):
    """The use of a layer's experts. name: the router's.

    load: tokens of each expert, by text; spread: busiest / mean; entropy: of the loads, 1 if all are equal; dead:
    experts without tokens; fanout_counts: tokens by their number of experts; drift: how far the mean score of an
    expert moves from the first half of a text to the second, in its standard deviations, root mean square over experts;
    pairs: experts that share more tokens than chance, with tokens and their ratio to those expected if experts chose
    independently; information: bits about the text in the expert of a token.
    """

    name: str
    experts: int
    load: dict[str, list[int]]
    spread: float
    entropy: float
    dead: list[int]
    fanout: float
    fanout_counts: list[int]
    drift: float
    pairs: list[tuple[int, int, int, float]]
    information: float


class Audit(NamedTuple):
    """What was found. known: False if the configuration names experts, but no router of theirs was recognised."""

    model: str
    training: bool
    tokens: int
    dtype: str
    tolerance: float
    checks: list[Check]
    layers: list[Layer]
    known: bool

    @property
    def leaks(self) -> bool:
        return any(check.changed for check in self.checks)

    @property
    def verdict(self) -> str:
        """Return one line."""
        mode = " in training" if self.training else ""
        leaks = [self._leak(check) for check in self.checks if check.changed]
        held = [CHANGES[check.what] for check in self.checks if check.positions and not check.changed]
        parts = [f"LEAKS through {listed(leaks)}"] if leaks else []
        parts += [f"nothing changes with {listed(held)}"] if held else []
        parts += [f"{CHANGES[check.what]} not judged ({check.reason})" for check in self.checks if check.reason]
        return (
            f"{self.model}: {'not causal' if leaks else 'causal'}{mode}: {'; '.join(parts)}; {self._loads()} "
            f"[{self.dtype}, tolerance {self.tolerance:.1g}]"
        )

    def _leak(self, check: Check) -> str:
        first = next((name for name, positions in check.choices.items() if positions), None)
        experts = f", experts from {first} on" if first is not None else ""
        return (
            f"{CHANGES[check.what]} ({check.changed} of {check.positions} positions, logits by up to "
            f"{check.largest:.2g}{experts})"
        )

    def _loads(self) -> str:
        if not self.layers:
            return "no experts" if self.known else "its routers are not recognised, so loads are not measured"
        worst = max(self.layers, key=lambda layer: layer.spread)
        dead, fanouts = sum(len(layer.dead) for layer in self.layers), [layer.fanout for layer in self.layers]
        return (
            f"{counted(len(self.layers), 'layer')} of {worst.experts} experts, fanout "
            f"{sum(fanouts) / len(fanouts):.2f}, largest load {worst.spread:.2f} times the mean, "
            f"{counted(dead, 'dead expert')}"
        )

    def to_dict(self) -> Data:
        """Return the same as JSON's types."""
        checks = [check._asdict() | {"leaks": check.changed > 0} for check in self.checks]
        layers = [layer._asdict() for layer in self.layers]
        facts = {"leaks": self.leaks, "verdict": self.verdict} | self._asdict()
        return dict(plain(facts | {"checks": checks, "layers": layers}))


def audit(
    model: nn.Module,
    tokenizer: Encodes,
    texts: Mapping[str, Iterable[str]],
    *,
    tokens: int = 32_768,
    training: bool = False,
    name: str = "model",
    progress: Progress = lambda what: lambda done, total: None,
) -> Audit:
    """Audit a causal language model, ours or one of transformers; the model keeps its mode.

    texts: documents by the text's name. tokens: those to measure loads on, shared among the texts. training: route as
    in training; dropout stays off. Raises ValueError if the model has no logits or a text is too short.
    """
    share = max(tokens // len(texts), LEAST)
    ids = {text: _ids(tokenizer, documents, share) for text, documents in texts.items()}
    for text, found in ids.items():
        if len(found) < LEAST:
            raise ValueError(f"{text} has {counted(len(found), 'token')}; give at least {LEAST}")
    device = next(model.parameters()).device
    context = _context(model)
    first = torch.cat([*ids.values()]).to(device)
    time = min(TIME, context, len(first) // ROWS)
    with _mode(model, first[None, :time], training):
        probe = Probe(model, first[: ROWS * time].view(ROWS, time))
        checks = probe.checks(progress("causality"))
        layers = measure(model, {text: found.to(device) for text, found in ids.items()}, context, progress("loads"))
    known = bool(layers) or not _names_experts(model)
    return Audit(
        name,
        training,
        sum(map(len, ids.values())),
        str(probe.dtype).removeprefix("torch."),
        probe.tolerance,
        checks,
        layers,
        known,
    )


def _ids(tokenizer: Encodes, documents: Iterable[str], most: int) -> Tensor:
    start = [tokenizer.bos] if isinstance(tokenizer, Tokenizer) else []
    found: Iterator[int] = (token for text in documents for token in (*start, *tokenizer.encode(text)))
    return torch.tensor([*islice(found, most)], dtype=torch.int64)


def _config(model: nn.Module) -> Any:
    """Return a configuration of transformers, of the text where there are several."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _context(model: nn.Module) -> int:
    if isinstance(model, GPT):
        return min(model.config.context, WINDOW)
    known = (getattr(_config(model), key, None) for key in ("max_position_embeddings", "n_positions", "max_seq_len"))
    return min([WINDOW, *(limit for limit in known if isinstance(limit, int) and limit > 0)])


def _names_experts(model: nn.Module) -> bool:
    counts = (getattr(_config(model), key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    return any(isinstance(count, int) and count > 1 for count in counts)


@contextmanager
def _mode(model: nn.Module, tokens: Tensor, training: bool) -> Iterator[None]:
    """Put the model into evaluation, or only its routers with what surrounds them into training, without dropout."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), watched(model) as found:
            forward(model, tokens)
        for name in found if training else ():
            layer = model.get_submodule(name.rpartition(".")[0]).train()
            for module in layer.modules():
                module.training &= not isinstance(module, _DropoutNd)
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


class _Sums:
    """Sums over the tokens of one layer."""

    def __init__(self, experts: int, texts: Iterable[str]) -> None:
        self.load = {text: torch.zeros(experts, dtype=torch.int64) for text in texts}
        self.fanouts = torch.zeros(experts + 1, dtype=torch.int64)
        self.together = torch.zeros(experts, experts, dtype=torch.float64)
        self.moments = torch.zeros(2, 3, experts, dtype=torch.float64)  # half; tokens, scores, their squares; expert

    def add(self, text: str, choice: Choice, late: Tensor) -> None:
        """late: (tokens,), True in the second half of the text."""
        assignment, scores = choice.assignment.cpu(), choice.scores.double().cpu()
        self.load[text] += assignment.sum(0)
        self.fanouts += torch.bincount(assignment.sum(1), minlength=len(self.fanouts))
        self.together += assignment.double().T @ assignment.double()
        for half in (0, 1):
            mine = scores[late == half]
            self.moments[half] += torch.stack([torch.ones_like(mine).sum(0), mine.sum(0), mine.square().sum(0)])

    def layer(self, name: str) -> Layer:
        load = torch.stack([*self.load.values()])
        total, experts, tokens = load.sum(0), load.shape[1], int(self.fanouts.sum())
        shares = total / total.sum()
        pairs = torch.triu_indices(experts, experts, 1).T
        shared, alone = self.together[pairs[:, 0], pairs[:, 1]], total[pairs].double().prod(1)
        lift = (shared * tokens / alone).where(shared >= SEEN, 0)
        best = [place for place in lift.argsort(descending=True)[:PAIRS].tolist() if lift[place] > 1]
        counts, sums, squares = self.moments.unbind(1)
        means = sums / counts
        deviation = ((squares.sum(0) / counts.sum(0)) - (sums.sum(0) / counts.sum(0)).square()).clamp(min=0).sqrt()
        moved = ((means[1] - means[0]) / deviation).nan_to_num(posinf=0, neginf=0)
        return Layer(
            name,
            experts,
            {text: each.tolist() for text, each in self.load.items()},
            float(load_spread(total)),
            float(-torch.xlogy(shares, shares).sum() / math.log(experts)) if experts > 1 else 1.0,
            (total == 0).nonzero().flatten().tolist(),
            int(total.sum()) / tokens,
            self.fanouts.tolist(),
            float(moved.square().mean().sqrt()),
            [(*pairs[place].tolist(), int(shared[place]), float(lift[place])) for place in best],
            float(mutual_information(load / load.sum(1, keepdim=True).clamp(min=1))) if len(load) > 1 else 0.0,
        )


@torch.no_grad()
def measure(
    model: nn.Module, ids: Mapping[str, Tensor], context: int, progress: Any = lambda done, total: None
) -> list[Layer]:
    """Return the use of experts in every layer with a router, for texts of at least one token, in windows."""
    sums: dict[str, _Sums] = {}
    cut = {
        text: each[: len(each) // (window := min(context, len(each))) * window].view(-1, window)
        for text, each in ids.items()
    }
    batches = [(text, start) for text, rows in cut.items() for start in range(0, len(rows), BATCH)]
    for done, (text, start) in enumerate(batches, start=1):
        batch = cut[text][start : start + BATCH]
        late = 2 * (torch.arange(batch.numel()) + start * batch.shape[1]) >= cut[text].numel()
        with watched(model) as found:
            forward(model, batch)
        for name, (choice, *_) in found.items():
            if len(choice.assignment) == batch.numel():
                sums.setdefault(name, _Sums(choice.assignment.shape[1], ids)).add(text, choice, late)
        progress(done, len(batches))
    return [each.layer(name) for name, each in sums.items()]

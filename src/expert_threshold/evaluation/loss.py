"""Measures cross-entropy and bits per byte on held-out tokens, at one or more numbers of experts per token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from operator import add
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..data import IGNORED, Batch, Tokenizer, Tokens, windows
from ..model import GPT, flops_per_token, parameter_counts
from ..routing import Observation


class Validation(NamedTuple):
    """The losses of a model on held-out tokens.

    loss: nats per token, averaged over all `tokens` targets, including those that start a document. bits_per_byte: bits
    per byte of the targets' text, which has `bytes` bytes. As in nanochat, a target without text, such as bos, adds
    neither bits nor bytes, so that models with different tokenizers are comparable. observations: one per MoE layer,
    summed over batches.
    """

    loss: float
    bits_per_byte: float
    tokens: int
    bytes: int
    observations: tuple[Observation, ...]

    def losses(self) -> dict[str, float | None]:
        """Return tokens, loss and bits per byte, with None in place of NaN, which JSON lacks."""
        numbers = {"tokens": self.tokens, "loss": self.loss, "bits_per_byte": self.bits_per_byte}
        return {name: number if math.isfinite(number) else None for name, number in numbers.items()}


@torch.no_grad()
def evaluate(
    model: GPT,
    tokens: Tokens,
    tokenizer: Tokenizer,
    *,
    batch_size: int = 16,
    max_tokens: int | None = None,
    training_pools: bool = False,
    group: dist.ProcessGroup | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Validation:
    """Return the losses on `tokens`, split into windows of the model's context in document order.

    Routing is causal, and except for rounding the result does not depend on batch_size (in sequences) or the number of
    ranks. max_tokens: number of targets to score, rounded up to whole windows; None scores all. group: ranks with the
    same model and tokens, which share the work and return the same result. progress: called with the number of tokens
    done and the total.

    training_pools=True routes as in training, so that a token of an expert-choice model competes with later tokens and
    with its batch. Only batches that are complete on every rank are scored, and the loss depends on their size.

    The model's mode is kept. Raises ValueError if an option is out of range or there are too few tokens.
    """
    if batch_size < 1 or (max_tokens is not None and max_tokens < 1):
        raise ValueError(f"batch_size={batch_size} and max_tokens={max_tokens} must be at least 1")
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    context = model.config.context
    targets = len(tokens) - 1
    unit = context * (batch_size * ranks if training_pools else 1)
    units = targets // unit if training_pools else math.ceil(targets / unit)
    if max_tokens is not None:
        units = min(units, math.ceil(max_tokens / unit))
    if units < 1:
        needed = unit + 1 if training_pools else 2
        raise ValueError(f"validation needs {needed} tokens but has {len(tokens)}; give more validation text")
    total = min(units * unit, targets)

    device = model.embed.weight.device
    token_bytes = torch.from_numpy(tokenizer.token_bytes())
    sums = torch.zeros(3, dtype=torch.float64)  # nats, nats of text, bytes of text
    observations: tuple[Observation, ...] = ()
    batches = _batches(islice(windows(tokens, context), math.ceil(total / context)), batch_size)
    done = 0
    was_training = model.training
    model.train(training_pools)
    try:
        while shares := list(islice(batches, ranks)):
            # A rank that has no rows left still runs an empty batch: a sharded model's forward needs every rank.
            batch = shares[rank] if rank < len(shares) else Batch(*(part[:0] for part in shares[0]))
            output = model(batch.tokens.to(device), batch.targets.to(device))
            losses = output.token_losses.cpu().double()
            sizes = token_bytes[batch.targets]
            sums += torch.stack([losses.sum(), losses[sizes > 0].sum(), sizes.sum().double()])
            observations = tuple(map(add, observations, output.observations)) if observations else output.observations
            done += sum(share.targets.numel() for share in shares)
            if progress is not None:
                progress(done, total)
    finally:
        model.train(was_training)
    assert done == total
    if group is not None:
        sums = sums.to(device)
        for tensor in (sums, *(field for observation in observations for field in observation.tensors().values())):
            dist.all_reduce(tensor, group=group)
    nats, text_nats, text_bytes = sums.tolist()
    bits_per_byte = text_nats / math.log(2) / text_bytes if text_bytes else math.nan
    return Validation(nats / total, bits_per_byte, total, int(text_bytes), observations)


def _batches(rows: Iterator[Batch], batch_size: int) -> Iterator[Batch]:
    """Yield stacked rows. The last window comes separately, without its padding, which would be routed as well."""
    while group := list(islice(rows, batch_size)):
        last = group[-1]
        length = int((last.targets != IGNORED).sum())
        whole = group if length == len(last.targets) else group[:-1]
        if whole:
            yield Batch(*map(torch.stack, zip(*whole, strict=True)))
        if whole is not group:
            yield Batch(last.tokens[None, :length], last.targets[None, :length])


class Point(NamedTuple):
    """Measurements of a model at one rate.

    rate: the target fanout, or None for the trained cutoffs. fanout: the measured number of routed experts per token,
    averaged over layers. fanouts: the same for each layer. loss: in nats per token. params_active and flops_per_token:
    at this fanout, the latter for a forward pass.
    """

    rate: float | None
    fanout: float
    fanouts: tuple[float, ...]
    loss: float
    bits_per_byte: float
    tokens: int
    params_active: int
    flops_per_token: int


def measure_rates(
    model: GPT,
    tokens: Tokens,
    tokenizer: Tokenizer,
    rates: Sequence[float | None],
    *,
    max_tokens: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Point]:
    """Measure the causal loss on the same tokens at each rate, and restore the model's own rate afterwards.

    max_tokens and progress: as in `evaluate`, but progress counts the tokens of all rates. Raises ValueError as
    `GPT.check_rate` does, before anything is measured.
    """
    for rate in rates:
        model.check_rate(rate)
    before = model.moe_layers()[0][1].router.rate
    points: list[Point] = []

    def count(done: int, total: int) -> None:
        if progress is not None:
            progress(len(points) * total + done, len(rates) * total)

    try:
        for rate in rates:
            model.set_rate(rate)
            found = evaluate(model, tokens, tokenizer, max_tokens=max_tokens, progress=count)
            fanouts = tuple(float(observation.fanout_mean) for observation in found.observations)
            fanout = sum(fanouts) / len(fanouts)
            active = parameter_counts(model.config, rate=fanout)["active"]
            flops = round(flops_per_token(model.config, rate=fanout) / 3)
            points.append(Point(rate, fanout, fanouts, *found[:3], active, flops))
    finally:
        model.set_rate(before)
    return points

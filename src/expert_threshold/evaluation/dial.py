"""Loss against active compute: one model at several rates of routed experts per token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..data import Tokenizer, Tokens
from ..model import GPT, flops_per_token, parameter_counts
from .loss import evaluate


class Point(NamedTuple):
    """Measurements of a model at one rate.

    rate: the target, None for the trained cutoffs. fanout: measured routed experts per token, the mean of `fanouts`,
    which has one value per layer. loss: nats per token. params_active and flops_per_token (of a forward) are those at
    the fanout.
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
    """Return the causal losses of the same tokens at each rate; the model keeps its own rate.

    max_tokens and progress as in `evaluate`; progress counts over all rates. Raises ValueError as `GPT.check_rate`
    does, before measuring anything.
    """
    for rate in rates:
        model.check_rate(rate)
    routers = [moe.router for _, moe in model.moe_layers()]
    before = routers[0].rate
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
            point = Point(
                rate,
                fanout,
                fanouts,
                found.loss,
                found.bits_per_byte,
                found.tokens,
                parameter_counts(model.config, rate=fanout)["active"],
                round(flops_per_token(model.config, rate=fanout) / 3),
            )
            points.append(point)
    finally:
        model.set_rate(before)
    return points

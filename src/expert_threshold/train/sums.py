"""The measurements of training steps: sums over micro-batches and ranks, and values measured once per step.

Metrics hold the mean of a value over steps, which does not depend on --log-every. Computed from sums over several steps
it would: the more are summed, the closer is the largest load to the mean load, and the mean batch cutoff to the cutoff.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..distributed import Status
from ..model import GPT, Observation
from ..moe import scores_not_finite, summed_over_ranks


class Sums(NamedTuple):
    """Sums over micro-batches, without gradient, on the model's device."""

    micro_batches: Tensor  # () float32
    loss: Tensor  # () with the rules' auxiliary losses
    cross_entropy: Tensor  # ()
    observations: tuple[Observation, ...]

    @classmethod
    def of(cls, loss: Tensor, cross_entropy: Tensor, observations: tuple[Observation, ...], ranks: int) -> Sums:
        """Return the sums of one micro-batch; each of the `ranks` that share it counts for 1 / ranks."""
        loss = loss.detach() / ranks
        return cls(torch.ones_like(loss) / ranks, loss, cross_entropy.detach() / ranks, observations)

    def __add__(self, other: Sums) -> Sums:  # type: ignore[override]
        return Sums(
            self.micro_batches + other.micro_batches,
            self.loss + other.loss,
            self.cross_entropy + other.cross_entropy,
            tuple(a + b for a, b in zip(self.observations, other.observations, strict=True)),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by flat name: `loss`, …, `0.load`, `0.tokens`, …"""
        named = {name: tensor for name, tensor in self._asdict().items() if name != "observations"}
        for layer, observation in enumerate(self.observations):
            named |= {f"{layer}.{name}": tensor for name, tensor in observation.tensors().items()}
        return named

    @classmethod
    def from_tensors(cls, named: dict[str, Tensor], layers: int) -> Sums:
        observations = tuple(Observation.from_tensors(of_layer(named, layer)) for layer in range(layers))
        return cls(named["micro_batches"], named["loss"], named["cross_entropy"], observations)


Values = dict[str, Tensor]
"""One step's values, or their sum over several steps, by `layer.name`; without gradient, on the model's device."""


def step_values(model: GPT, observations: tuple[Observation, ...]) -> Values:
    """Return the values of a step; call it before the rules are updated, for the cutoffs and biases that routed it."""
    found: Values = {}
    for (layer, moe), seen in zip(model.moe_layers(), observations, strict=True):
        values = {name: getattr(seen, name) for name in ("load_spread", "fanout_std", "score_std", "gate_std")}
        rule, state = moe.router.rule, moe.router.state
        of_rule = rule.describe(state) | rule.measure(state, seen)
        values |= {name: value.clone() for name, value in of_rule.items()}  # the state is updated in place
        found |= {f"{layer}.{name}": value for name, value in values.items()}
    return found


def add_steps(a: Values, b: Values) -> Values:
    """Return the sum of both, value by value."""
    return {name: value + b[name] for name, value in a.items()}


def of_layer(values: Mapping[str, Tensor], layer: int) -> Values:
    """Return the values of one layer, by name."""
    prefix = f"{layer}."
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


class Interval(NamedTuple):
    """The steps between two lines of metrics, without skipped ones."""

    steps: int
    sums: Sums  # over these steps, on the CPU
    means: Values  # over these steps, on the CPU
    tokens_per_second: float


def all_reduce(
    sums: Sums, norm: Tensor, status: Status, group: dist.ProcessGroup | None
) -> tuple[Sums, Tensor, Status]:
    """Return the sums, the gradient norm and the status over all ranks, by one all-reduce of a few numbers."""
    if group is None:
        return sums, norm, status
    tensors, structure = tree_flatten((sums, norm.double().square(), torch.tensor(status, device=norm.device)))
    sums, square, counts = tree_unflatten(summed_over_ranks(tensors, group), structure)
    return sums, square.sqrt().to(norm.dtype), Status(*counts.tolist())


def describe_nonfinite(model: GPT, sums: Sums) -> str:
    """Return a clause naming what is not finite: loss, gradients or scores, the latter of the first layer with NaN."""
    layers = zip(model.moe_layers(), sums.observations, strict=True)
    clauses = (scores_not_finite(observation, f"layer {layer}") for (layer, _), observation in layers)
    scores = next(filter(None, clauses), None)
    if sums.loss.isfinite():
        return scores or "a gradient is not finite"
    return "the loss is not finite" + ("" if scores is None else f" and {scores}")

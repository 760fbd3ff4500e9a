"""The least bytes that a rank has to send in one training step, by kind, from a model's shape and recorded loads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from expert_threshold.config import RunConfig
from expert_threshold.model import GPTConfig, parameter_counts
from expert_threshold.routing import ExpertThreshold
from expert_threshold.routing.observation import observe
from expert_threshold.routing.selection import DIGITS

FLOAT32, INT32, INT64 = 4, 4, 8  # bytes
LAYOUTS = ("replicate", "shard", "expert_parallel")


class Loads(NamedTuple):
    """usage: of every layer, each expert's tokens over all tokens, as recorded in a run."""

    usage: Sequence[Sequence[float]]

    def at(self, fanout: float) -> Loads:
        """The same spread at another mean fanout."""
        mean = sum(map(sum, self.usage)) / len(self.usage)
        return Loads([[min(1.0, usage * fanout / mean) for usage in layer] for layer in self.usage])

    def spread(self, owners: int) -> float:
        """Largest load of an owner over the mean, of neighbouring experts; the mean over layers."""
        sums = [_by_owner(layer, owners) for layer in self.usage]
        return sum(max(map(sum, layer)) * owners / sum(map(sum, layer)) for layer in sums) / len(sums)

    def rows_per_token(self, owners: int) -> float:
        """Rows that a token sends to other ranks: one for each owner of some of its experts, were those independent."""
        there = [1 - math.prod(1 - usage for usage in own) for layer in self.usage for own in _by_owner(layer, owners)]
        return sum(there) / len(self.usage) * (owners - 1) / owners

    def pairs_per_token(self, owners: int) -> float:
        """The same if a row were sent for every expert."""
        return sum(map(sum, self.usage)) / len(self.usage) * (owners - 1) / owners


def _by_owner(layer: Sequence[float], owners: int) -> list[Sequence[float]]:
    own = len(layer) // owners
    return [layer[first : first + own] for first in range(0, len(layer), own)]


def row_bytes(config: GPTConfig, owners: int, itemsize: int, *, gates: bool) -> int:
    """One row on its way; out and, as gradients, back, it has its gates with it."""
    assert config.rule is not None
    return config.d_model * itemsize + (config.rule.num_experts // owners * FLOAT32 if gates else 0)


def all_to_all_bytes(config: GPTConfig, owners: int, rows: float, itemsize: int) -> float:
    """So many rows out and back, and their gradients likewise, in every layer with experts."""
    per_row = sum(2 * row_bytes(config, owners, itemsize, gates=gates) for gates in (True, False))
    return moe_layers(config) * rows * per_row


def selection_bytes(config: GPTConfig, ranks: int) -> list[tuple[str, int]]:
    """The collectives of one layer's selection over a global pool, each with its bytes: kind and whole.

    As GPUs select, by `routing/radix.py`: counts are int32, and before the first digit all ks share one histogram.
    """
    rule = config.rule
    assert rule is not None
    ks = 3 if isinstance(rule, ExpertThreshold) else 1
    rows = [1, *[ks] * (len(DIGITS) - 1)]
    histograms = [
        ("all_reduce", row * rule.num_experts * INT32 << bits) for row, bits in zip(rows, DIGITS, strict=True)
    ]
    return [("all_reduce", INT64), *histograms, ("gather", ks * rule.num_experts * INT64 * ranks)]


def observation_bytes(config: GPTConfig) -> int:
    """Returns the bytes of one layer's observation."""
    assert config.rule is not None
    nothing = torch.zeros(1, 1, config.rule.num_experts)
    return sum(tensor.nbytes for tensor in observe(nothing, nothing > 0, target=0).tensors().values())


def moe_layers(config: GPTConfig) -> int:
    return config.layers - config.dense_layers if config.rule is not None else 0


def minimum_bytes(run: RunConfig, layout: str, ranks: int, owners: int, rows: float, itemsize: int) -> dict[str, float]:
    """Bytes that a rank has to send in a step, by kind; rows: of all its tokens, to other ranks, in one layer.

    Every gradient is summed once and every weight brought back once, as float32; what is sharded is gathered twice, in
    the compute dtype. Of selection no minimum is known; it is what the histograms take.
    """
    config, share = run.model, (ranks - 1) / ranks
    counts = parameter_counts(config)
    whole = counts["total"] * FLOAT32 * share
    if layout == "expert_parallel":
        copies = ranks // owners
        experts = counts["routed_experts"] * FLOAT32
        whole += experts / owners * (copies - 1) / copies - experts * share
    gathered = 2 * counts["total"] * itemsize * share if layout == "shard" else whole
    least = {"gradients": whole, "weights": gathered}
    layers = moe_layers(config)
    if layers:
        least["observations"] = 2 * share * layers * observation_bytes(config)
        sizes = {"all_reduce": 2 * share, "gather": share}
        least["selection"] = layers * sum(sizes[kind] * size for kind, size in selection_bytes(config, ranks))
    if layout == "expert_parallel":
        least["all_to_all"] = all_to_all_bytes(config, owners, rows, itemsize)
        least["counts"] = layers * (owners - 1) * INT64
    return least

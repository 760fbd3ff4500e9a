"""A model of one training step on many GPUs: what is computed, what is sent, over which links. No constants inside.

Every collective is taken to be the best known one for large messages in two levels: within nodes, then between them.
Each costs the bytes that a GPU sends over a link divided by the link's bandwidth, and the latency of a tree's depth.
Congestion, stragglers other than by load, and the time to launch kernels are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from expert_threshold.config import RunConfig
from expert_threshold.model import GPTConfig, flops_per_token, parameter_counts
from expert_threshold.routing import ExpertThreshold
from expert_threshold.routing.observation import observe
from expert_threshold.routing.selection import DIGITS

FLOAT32, INT32, INT64 = 4, 4, 8  # bytes
LAYOUTS = ("replicate", "shard", "expert_parallel")


class Cluster(NamedTuple):
    """Bandwidths are of one GPU, in one direction, bytes a second; latencies are of one message, seconds."""

    gpus: int
    gpus_per_node: int
    node_bandwidth: float
    network_bandwidth: float
    node_latency: float
    network_latency: float


class Compute(NamedTuple):
    """The peak rates of one GPU."""

    tokens_per_second: float  # forward and backward, at even load
    optimizer_seconds: float  # a whole step of the optimizer, all matrices
    itemsize: int  # bytes of a number of the compute dtype


class Group(NamedTuple):
    """GPUs that talk with each other: so many on a node, on so many nodes."""

    per_node: int
    nodes: int

    @property
    def size(self) -> int:
        return self.per_node * self.nodes


def group_of(cluster: Cluster, size: int, stride: int = 1) -> Group:
    """Every stride-th of size · stride neighbouring GPUs."""
    per_node = max(1, min(size, cluster.gpus_per_node // stride))
    return Group(per_node, size // per_node)


def latency(cluster: Cluster, group: Group) -> float:
    """Seconds for a message to all: the depth of a tree over nodes and of one within a node."""
    return (
        math.ceil(math.log2(group.per_node)) * cluster.node_latency
        + math.ceil(math.log2(group.nodes)) * cluster.network_latency
    )


def gather_seconds(cluster: Cluster, group: Group, whole: float) -> float:
    """An all-gather to `whole` bytes on every GPU, or a reduce-scatter of them."""
    within = whole * (group.per_node - 1) / group.per_node / cluster.node_bandwidth
    between = whole / group.per_node * (group.nodes - 1) / group.nodes / cluster.network_bandwidth
    return within + between + latency(cluster, group)


def all_reduce_seconds(cluster: Cluster, group: Group, whole: float) -> float:
    return 2 * gather_seconds(cluster, group, whole)


def all_to_all_seconds(cluster: Cluster, group: Group, to_others: float) -> float:
    """`to_others` bytes leave each GPU, as many for every other; both kinds of links are busy at once."""
    others = max(group.size - 1, 1)
    within = to_others * (group.per_node - 1) / others / cluster.node_bandwidth
    between = to_others * (group.size - group.per_node) / others / cluster.network_bandwidth
    return max(within, between) + latency(cluster, group)


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


class StepTime(NamedTuple):
    """Seconds of a step by part. Those after `optimizer` are of communication, as if nothing overlapped."""

    forward: float
    backward: float
    imbalance: float  # waiting for the expert owner with the largest load
    optimizer: float
    gradients: float
    weights: float  # all-gathers of updated weights, or of sharded ones before they are used
    all_to_all: float
    selection: float
    observations: float

    @property
    def serial(self) -> float:
        return sum(self)

    def overlapped(self, layout: str) -> float:
        """Gradients leave while backward is at work, and updated weights return while the optimizer is; sharded ones
        are gathered while the block before is at work. The rest is waited for."""
        forward, backward, optimizer = self.forward, max(self.backward, self.gradients), self.optimizer
        if layout == "shard":
            forward = max(forward, self.weights / 2)
            backward = max(self.backward, self.gradients + self.weights / 2)
        else:
            optimizer = max(optimizer, self.weights)
        waited = self.imbalance + self.all_to_all + self.selection + self.observations
        return forward + backward + optimizer + waited


def step_time(
    run: RunConfig, cluster: Cluster, compute: Compute, loads: Loads, layout: str, tokens: int, owners: int
) -> StepTime:
    """A step with so many tokens on each GPU, in one micro-batch. owners: GPUs that split a layer's experts."""
    config, everyone = run.model, group_of(cluster, cluster.gpus)
    counts = parameter_counts(config)
    experts = counts["routed_experts"]
    layers = moe_layers(config)
    work = tokens / compute.tokens_per_second
    split = layout == "expert_parallel"
    rest = (counts["total"] - experts if split else counts["total"]) * FLOAT32
    gradients = gather_seconds(cluster, everyone, rest)
    weights = gradients
    imbalance = all_to_all = 0.0
    if layout == "shard":  # before forward and again before backward, in the compute dtype
        per_block = counts["total"] * compute.itemsize / config.layers
        weights = 2 * config.layers * gather_seconds(cluster, everyone, per_block)
    if split:
        own = group_of(cluster, owners)
        copies = group_of(cluster, cluster.gpus // owners, stride=owners)
        gradients += gather_seconds(cluster, copies, experts / owners * FLOAT32)
        weights += gather_seconds(cluster, copies, experts / owners * FLOAT32)
        spread = loads.spread(owners)
        routed = 6 * experts / config.rule.num_experts * config.rule.experts_per_token / flops_per_token(config)
        imbalance = work * routed * (spread - 1)
        bytes_sent = all_to_all_bytes(config, owners, tokens * loads.rows_per_token(owners), compute.itemsize)
        messages = 4 * layers
        counting = layers * all_to_all_seconds(cluster, own, owners * INT64)
        all_to_all = counting + messages * all_to_all_seconds(cluster, own, spread * bytes_sent / messages)
    selection = 0.0
    if getattr(config.rule, "pool", None) == "global":
        for kind, size in selection_bytes(config, cluster.gpus):
            seconds = all_reduce_seconds if kind == "all_reduce" else gather_seconds
            selection += layers * seconds(cluster, everyone, size)
    return StepTime(
        forward=work / 3,
        backward=work * 2 / 3,
        imbalance=imbalance,
        optimizer=compute.optimizer_seconds / cluster.gpus,
        gradients=gradients,
        weights=weights,
        all_to_all=all_to_all,
        selection=selection,
        observations=all_reduce_seconds(cluster, everyone, layers * observation_bytes(config)),
    )

"""Results of a rule: the assignment, its gates, and the sums from which updates, metrics and figures are computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Observation(NamedTuple):
    """Statistics of one forward pass. All are sums, so `a + b` combines micro-batches and an all-reduce combines ranks.

    Counts are int64 and moments are float32, with the shape (experts,) unless noted otherwise. Sums that only some
    rules have are attributes, too: `observation.dropped` is `observation.sums["dropped"]`.
    """

    tokens: Tensor  # ()
    target: Tensor  # () float32, target tokens per expert
    load: Tensor  # tokens per expert
    fanout_counts: Tensor  # (experts + 1,) tokens with fanout 0, 1, …, experts
    score_sum: Tensor  # (experts,)
    score_sq_sum: Tensor  # (experts,)
    gate_sum: Tensor
    gate_sq_sum: Tensor
    sums: dict[str, Tensor]  # the rule's own sums, of any shape

    def __add__(self, other: Observation) -> Observation:  # type: ignore[override]
        if self.sums.keys() != other.sums.keys():
            raise ValueError(f"cannot add observations of two rules with sums {list(self.sums)} and {list(other.sums)}")
        fields: list[Any] = [a + b for a, b in zip(self[:-1], other[:-1], strict=True)]
        fields.append({name: value + other.sums[name] for name, value in self.sums.items()})
        return Observation(*fields)

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("__") or name not in self.sums:  # torch.compile probes incomplete records for dunder names
            raise AttributeError(f"observation has no {name!r}")
        return self.sums[name]

    def tensors(self) -> dict[str, Tensor]:
        """Return all sums, keyed by name; the rule's own sums are named `sums.NAME`."""
        core = {name: tensor for name, tensor in self._asdict().items() if name != "sums"}
        return core | {f"sums.{name}": tensor for name, tensor in self.sums.items()}

    @property
    def usage(self) -> Tensor:
        """Load of each expert divided by the number of tokens."""
        return self.load / self.tokens

    @property
    def batch_cutoff(self) -> Tensor:
        """The k-th largest score, averaged over pools; NaN without pools. Only for rules that form pools."""
        return self.cutoff_sum / self.pools

    @property
    def load_spread(self) -> Tensor:
        """Largest load divided by the mean load. A value of 1 means perfect balance."""
        return self.load.max() / self.load.float().mean()

    @property
    def fanout_mean(self) -> Tensor:
        """Mean number of routed experts per token."""
        return self.load.sum() / self.tokens

    @property
    def fanout_std(self) -> Tensor:
        """Standard deviation of the number of routed experts per token."""
        share = self.fanout_counts / self.tokens
        fanout = torch.arange(len(share), device=share.device)
        return (share * (fanout - self.fanout_mean) ** 2).sum().sqrt()

    @property
    def score_std(self) -> Tensor:
        """Standard deviation of each expert's scores over tokens."""
        return _std(self.score_sum, self.score_sq_sum, self.tokens)

    @property
    def gate_std(self) -> Tensor:
        """Standard deviation of each expert's gates over tokens."""
        return _std(self.gate_sum, self.gate_sq_sum, self.tokens)


_TAKEN = frozenset(dir(Observation))


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return a scalar bool tensor, which is False if any of the tensors contains a NaN or an infinity."""
    return torch.cat([tensor.flatten() for tensor in tensors if tensor.is_floating_point()]).isfinite().all()


def scores_not_finite(observation: Observation, layer: str) -> str | None:
    """Return a message naming the layer's experts whose sums are not finite, or None if all are finite."""
    finite = torch.ones_like(observation.load, dtype=torch.bool)
    for value in observation.tensors().values():
        good = value.isfinite()
        finite &= good.view(-1, len(finite)).all(0) if good.shape[-1:] == finite.shape else good.all()
    experts = [str(expert) for expert, ok in enumerate(finite.tolist()) if not ok]
    if not experts:
        return None
    which = f"expert {experts[0]}" if len(experts) == 1 else f"experts {', '.join(experts)}"
    return f"the scores of {'all experts' if len(experts) == len(finite) > 1 else which} in {layer} are not finite"


def summed_over_ranks(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors summed over the group's ranks, in one float64 all-reduce, which keeps counts exact."""
    flat = torch.cat([tensor.double().flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]


def over_ranks(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the tensor summed over the group's ranks, or the tensor itself without a group."""
    if group is None:
        return tensor
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total


def _std(total: Tensor, square_total: Tensor, tokens: Tensor) -> Tensor:
    return (square_total / tokens - (total / tokens) ** 2).clamp(min=0).sqrt()


class Routing(NamedTuple):
    """The result of routing one batch of scores. Its fields should be passed by keyword.

    scores: (batch, time, num_scores) float32, as given. gates: (batch, time, experts) float32, the differentiable
    factors applied to experts' outputs. assignment: the boolean z, shaped like gates. loss: a differentiable scalar to
    add to the training loss, or None. passthrough: (batch, time), the factor applied to x before it is added to the
    experts' sum, or None.
    """

    scores: Tensor
    gates: Tensor
    assignment: Tensor
    observation: Observation
    loss: Tensor | None = None
    passthrough: Tensor | None = None


@torch.no_grad()
def observe(
    scores: Tensor, assignment: Tensor, gates: Tensor | None = None, *, target: float | None = None, **sums: Tensor
) -> Observation:
    """Return the observation of an assignment (batch, time, experts) for scores (batch, time, num_scores).

    gates: shaped like the assignment; defaults to σ(scores). target: target tokens per expert; defaults to the mean
    load. sums: the rule's own statistics, each a sum over tokens or batches. Raises ValueError if a name is already an
    attribute of every observation, which would shadow the sum.
    """
    if taken := [name for name in sums if name in _TAKEN]:
        raise ValueError(f"sums={sorted(taken)} are already attributes of every observation; rename them")
    scores = scores.detach()[..., : assignment.shape[-1]].flatten(0, -2)
    assignment = assignment.flatten(0, -2)
    gates = scores.sigmoid() if gates is None else gates.detach().flatten(0, -2)
    load, fanout = assignment.sum(0), assignment.sum(1)
    return Observation(
        tokens=load.new_full((), scores.shape[0]),  # len would be a constant in an exported graph
        target=load.sum(dtype=scores.dtype) / len(load) if target is None else scores.new_full((), target),
        load=load,
        fanout_counts=load.new_zeros(len(load) + 1).scatter_add_(0, fanout, torch.ones_like(fanout)),
        score_sum=scores.sum(0),
        score_sq_sum=scores.square().sum(0),
        gate_sum=gates.sum(0),
        gate_sq_sum=gates.square().sum(0),
        sums=sums,
    )

"""What a rule returns: the assignment, and the sums that updates, metrics and figures are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .sketch import LEVELS


class Observation(NamedTuple):
    """What one forward saw. Every field is a sum, so `a + b` joins micro-batches and an all-reduce joins ranks.

    Counts are int64, moments and cutoffs float32; `(experts,)` unless said otherwise.
    """

    tokens: Tensor  # ()
    pools: Tensor  # () selections made; 0 where none was (inference, token choice)
    target: Tensor  # () float32, tokens per expert aimed at
    cutoff_sum: Tensor  # batch cutoffs, summed over pools
    load: Tensor  # tokens per expert as assigned
    raw_load: Tensor  # tokens per expert above the cutoff, before any bound
    dropped: Tensor  # tokens above the cutoff that a bound turned away
    filled: Tensor  # tokens not above the cutoff that a bound took in
    score_sum: Tensor
    score_sq_sum: Tensor
    gate_sum: Tensor
    gate_sq_sum: Tensor
    fanout_counts: Tensor  # (experts + 1,) tokens with fanout 0, 1, …, experts
    sketch_sum: Tensor  # (levels, experts) float32, each forward's sketch times its tokens; 0 where no pool was formed

    def __add__(self, other: Observation) -> Observation:  # type: ignore[override]
        return Observation(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def batch_cutoff(self) -> Tensor:
        """Mean over pools of the k-th largest score; NaN where no pool was formed."""
        return self.cutoff_sum / self.pools

    @property
    def batch_sketch(self) -> Tensor:
        """Mean over tokens of the sketches of their scores, (levels, experts); NaN where there were no tokens."""
        return self.sketch_sum / self.tokens

    @property
    def usage(self) -> Tensor:
        """Load over tokens, per expert."""
        return self.load / self.tokens

    @property
    def raw_usage(self) -> Tensor:
        """Share of tokens above the cutoff, per expert, before any bound."""
        return self.raw_load / self.tokens

    @property
    def saturation(self) -> Tensor:
        """Tokens dropped by the upper bound / tokens above the cutoff, per expert (paper, Capacity Constraints)."""
        return self.dropped / self.raw_load.clamp(min=1)

    @property
    def starvation(self) -> Tensor:
        """Tokens filled in by the lower bound / k, per expert (paper, Capacity Constraints)."""
        return self.filled / self.target.clamp(min=1)

    @property
    def load_spread(self) -> Tensor:
        """Largest load over mean load; 1 is perfect balance."""
        return self.load.max() / self.load.float().mean()

    @property
    def fanout_mean(self) -> Tensor:
        """Routed experts per token, on average."""
        return self.load.sum() / self.tokens

    @property
    def fanout_std(self) -> Tensor:
        """Spread of the routed experts per token."""
        share = self.fanout_counts / self.tokens
        fanout = torch.arange(len(share), device=share.device)
        return (share * (fanout - self.fanout_mean) ** 2).sum().sqrt()

    @property
    def score_std(self) -> Tensor:
        """Standard deviation of the scores over tokens, per expert."""
        return _std(self.score_sum, self.score_sq_sum, self.tokens)

    @property
    def gate_std(self) -> Tensor:
        """Standard deviation of the gates over tokens, per expert."""
        return _std(self.gate_sum, self.gate_sq_sum, self.tokens)


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """() bool: False where a number in any tensor is NaN or infinite."""
    return torch.cat([tensor.flatten() for tensor in tensors if tensor.is_floating_point()]).isfinite().all()


def scores_not_finite(observation: Observation, layer: str) -> str | None:
    """Names the experts with a sum that is not finite, as one score of NaN makes it, and the layer; None if all are."""
    finite = torch.ones_like(observation.load, dtype=torch.bool)
    for value in observation:
        good = value.isfinite()
        finite &= good.view(-1, len(finite)).all(0) if good.shape[-1:] == finite.shape else good.all()
    experts = [str(expert) for expert, ok in enumerate(finite.tolist()) if not ok]
    if not experts:
        return None
    which = f"expert {experts[0]}" if len(experts) == 1 else f"experts {', '.join(experts)}"
    return f"the scores of {'all experts' if len(experts) == len(finite) > 1 else which} in {layer} are not finite"


def summed_over_ranks(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """The sums of the group's ranks, in one all-reduce; in float64, which holds counts exactly."""
    flat = torch.cat([tensor.double().flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]


def _std(total: Tensor, square_total: Tensor, tokens: Tensor) -> Tensor:
    return (square_total / tokens - (total / tokens) ** 2).clamp(min=0).sqrt()


class Routing(NamedTuple):
    """A rule's answer for one batch of scores.

    scores: (batch, time, experts) float32, as given; assignment: the boolean z, same shape;
    loss: None, or a differentiable scalar to be added to the training loss.
    """

    scores: Tensor
    assignment: Tensor
    observation: Observation
    loss: Tensor | None


@torch.no_grad()
def observe(scores: Tensor, assignment: Tensor, *, target: float) -> Observation:
    """Sum up an assignment of `scores` (batch, time, experts) that neither pool nor bound had a part in.

    target: tokens per expert aimed at.
    """
    experts = scores.shape[-1]
    scores, assignment = scores.detach().reshape(-1, experts), assignment.reshape(-1, experts)
    gates = scores.sigmoid()
    load, fanout = assignment.sum(0), assignment.sum(1)
    return Observation(
        tokens=load.new_full((), len(scores)),
        pools=load.new_zeros(()),
        target=scores.new_full((), target),
        cutoff_sum=scores.new_zeros(experts),
        load=load,
        raw_load=load.clone(),  # no two fields share memory: each may be reduced over ranks in place
        dropped=torch.zeros_like(load),
        filled=torch.zeros_like(load),
        score_sum=scores.sum(0),
        score_sq_sum=scores.square().sum(0),
        gate_sum=gates.sum(0),
        gate_sq_sum=gates.square().sum(0),
        fanout_counts=load.new_zeros(experts + 1).scatter_add_(0, fanout, torch.ones_like(fanout)),
        sketch_sum=scores.new_zeros(LEVELS, experts),
    )

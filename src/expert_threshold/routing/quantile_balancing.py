"""Quantile balancing: token choice in which every expert has a price, measured on every batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..option import Count, Decay, NonNegativeInt, Positive, option
from .cutoffs import form_pools
from .gates import NULL_SCORES, Gate, Over, Valued
from .observation import Observation, Routing, observe, over_ranks
from .rule import Rule, Scope, Window
from .selection import kth_largest, take

PricePool = Literal["global", "batch"]
PriceEstimator = Literal["exact", "histogram"]


class PriceState(NamedTuple):
    """Running mean of the batches' prices, debiased like Adam's moments: β is mean / weight."""

    mean: Tensor  # (experts,) float32
    weight: Tensor  # () float32, the share of the mean that comes from data


def price(state: PriceState) -> Tensor:
    """Return the prices β (experts,) to subtract from scores for selection only. They are 0 before the first update."""
    return torch.where(state.weight > 0, state.mean / state.weight, 0.0)


BINS = 1000
"""Bins of each expert's histogram."""


@dataclass(frozen=True)
class QuantileBalancing(Valued):
    """Every token goes to k experts. Loads are balanced by prices, which are quantiles of the last batch's scores.

    Each step is one iteration on the dual of a balanced assignment problem: m tokens go to n experts, with k experts
    per token and m k / n tokens per expert. It needs neither a loss nor a step size. Here s stands for the scores r or,
    with over="gates", for σ(r) or softmax(r), whichever the gates use:

        z[t,i] = 1{i among the k largest of s[t,·] − β},   g[t,i] = σ(r[t,i]), or another gate
        α_t    = the (k+1)-th largest of s[t,·] − β
        β_i    ← the (⌊m k / n⌋ + 1)-th largest of s[·,i] − α, less the mean over experts

    The mean does not affect the selection but would drift, so it is subtracted. Without α, the price of a token, this
    is expert threshold with the cutoff of the last batch (decay 0). Su Jianlin derived the rule
    (kexue.fm/archives/11619; 11626 without a fixed fanout, 11760 per sequence). Kimi K3's technical report uses a
    histogram (section 2.3.3, appendices C and D).
    """

    experts_per_token: Count = option(1, "Number of routed experts per token.")
    over: Over = option("scores", "Values from which prices are subtracted: the scores, or their sigmoid or softmax.")
    decay: Decay = option(0.0, "Decay of the running mean of the prices. 0 uses the prices of the last step.")
    pool: PricePool = option(
        "global",
        "Tokens over which quantiles are taken: all ranks' micro-batches, or each micro-batch, averaging prices.",
    )
    estimator: PriceEstimator = option(
        "exact", "How quantiles are computed: by exact selection, or by interpolation in a histogram of all values."
    )
    gate: Gate = option("sigmoid", "Function that turns scores into gates; see token_choice for the choices.")
    gate_scale: Positive = option(1.0, "Factor applied to all gates.")
    null_scores: NonNegativeInt = option(0, NULL_SCORES)

    def init(self) -> PriceState:
        return PriceState(torch.zeros(self.num_experts, dtype=torch.float32), torch.tensor(0.0, dtype=torch.float32))

    def route(
        self, scores: Tensor, state: PriceState, *, training: bool, group: dist.ProcessGroup | None = None
    ) -> Routing:
        """Route float32 scores of shape (batch, time, num_scores). Training also measures the prices of the batch."""
        tokens, experts, k = scores[..., 0].numel(), self.num_experts, self.experts_per_token
        values = self.values_of(scores)
        # Experts compete for a token, so every token is a pool. If no (k+1)-th expert exists, a token takes all.
        net = (values - price(state)).reshape(tokens, experts, 1)
        lowest, next_best = kth_largest(net, [k, min(k + 1, experts)])
        assignment = take(net, lowest).reshape(values.shape)
        gates = self.gates_of(scores, assignment)
        pools, price_sum = assignment.new_zeros((), dtype=torch.int64), torch.zeros_like(state.mean)
        if training:
            pools, price_sum = self._measured(values - next_best.score.reshape(*scores.shape[:2], 1), group)
        target = tokens * k / experts
        observation = observe(scores, assignment, gates, target=target, pools=pools, price_sum=price_sum)
        return Routing(scores=scores, gates=gates, assignment=assignment, observation=observation)

    def _measured(self, margins: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """Return the number of pools, 0 or 1, and the sum of their prices. margins: s − α, (batch, time, experts)."""
        pools = form_pools(margins, self.pool, group)
        count = margins.new_full((), len(pools.scores), dtype=torch.int64)
        if pools.tokens == 0 or self.experts_per_token == self.num_experts:  # nothing to choose, so no price
            return count, margins.new_zeros(self.num_experts)
        place = pools.tokens * self.experts_per_token // self.num_experts + 1
        if self.estimator == "histogram":
            return count, kth_of_histogram(pools.scores[0], place, BINS, pools.group)
        return count, kth_largest(pools.scores, [place], pools.group)[0].score.sum(0)

    @torch.no_grad()
    def update(self, state: PriceState, observation: Observation) -> PriceState:
        """Return the state with the new running mean of prices. A step that formed no pool changes nothing."""
        mean = self.decay * state.mean + (1 - self.decay) * _batch_price(observation)
        weight = self.decay * state.weight + (1 - self.decay)
        seen = observation.pools > 0
        return PriceState(mean.where(seen, state.mean), weight.where(seen, state.weight))

    @property
    def label(self) -> str:
        return f"QB{'' if self.estimator == 'exact' else ' histogram'}{self.label_of_gates()}"

    def scope(self, training: bool) -> Scope:
        return "token"

    def pool_scope(self) -> Scope:
        return self.pool

    def max_pairs(self, tokens: int, *, training: bool, ranks: int = 1) -> int:
        return tokens * self.experts_per_token

    def window(self, sequence: int, batch: int, step: int) -> Window:
        return Window(batch, round(step / (1 - self.decay)))

    def biased_top_k(self, state: PriceState) -> tuple[Tensor, int] | None:
        return (-price(state), self.experts_per_token) if self.over == "scores" else None

    def describe(self, state: PriceState) -> dict[str, Tensor]:
        """Return −β as `bias` if it has the units of scores; otherwise, return β as `price`."""
        return {"bias": -price(state)} if self.over == "scores" else {"price": price(state)}

    def measure(self, state: PriceState, observation: Observation) -> dict[str, Tensor]:
        """Return the batch's prices and their distance from the prices that routed it."""
        batch = _batch_price(observation)
        return {"batch_price": batch, "price_distance": (batch - price(state)).abs()}

    @classmethod
    def cases(cls) -> Mapping[str, Rule]:
        return {
            "1 of them": cls(6, 1),
            "2 of them": cls(6, 2),
            "all of them": cls(6, 6),
            "running mean": cls(6, 2, decay=0.5),
            "over gates": cls(6, 2, over="gates"),
            "over shares": cls(6, 2, over="gates", gate="softmax"),
            "null scores": cls(6, 2, gate="softmax", null_scores=3),
            "histogram over sigmoids": cls(6, 2, over="gates", gate="sigmoid_normalised", estimator="histogram"),
            "micro-batch": cls(6, 2, pool="batch"),
            "histogram": cls(6, 2, estimator="histogram"),
        }


def _batch_price(observation: Observation) -> Tensor:
    """Return the prices averaged over pools, with mean 0 over experts, or NaN if no pool was formed."""
    batch = observation.price_sum / observation.pools
    return batch - batch.mean()


def kth_of_histogram(values: Tensor, k: int, bins: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return each expert's k-th largest value, to within the width of a bin. values: (tokens, experts).

    Bins of equal width divide the range between an expert's smallest and largest value on all ranks of the group.
    Tokens are assumed to be spread evenly within a bin. k is between 1 and the number of tokens on all ranks.
    """
    ends = values.new_full((2, values.shape[1]), -torch.inf)
    if len(values):
        ends = torch.stack([-values.amin(0), values.amax(0)])
    if group is not None:
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    low, width = -ends[0], (ends[1] + ends[0]) / bins
    place = ((values - low) / width).nan_to_num(0).clamp(0, bins - 1).long()  # 0 / 0 where all values are equal
    counts = torch.zeros(bins, values.shape[1], dtype=torch.int64, device=values.device)
    counts.scatter_add_(0, place, torch.ones_like(place))
    counts = over_ranks(counts, group)
    at_or_above = counts.flip(0).cumsum(0).flip(0)
    found = (at_or_above >= k).sum(0, keepdim=True) - 1
    inside = counts.gather(0, found)
    above = at_or_above.gather(0, found) - inside
    return low + width * (found + 1 - (k - above - 0.5) / inside)[0]

"""Expert choice: every expert takes its k highest-scoring tokens of a pool (paper, Eq. 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from .observation import Observation, Routing
from .options import check_cutoff, check_experts
from .pools import (
    CutoffState,
    Pool,
    bounds,
    cutoff,
    form_pools,
    init_cutoff,
    route_by_cut,
    route_by_cutoff,
    update_cutoff,
)
from .selection import kth_largest


@dataclass(frozen=True)
class ExpertChoice:
    """Exact load in training, at the price of looking at the whole pool; by the running cutoffs in inference."""

    # Routed experts in a layer.
    num_experts: int = 16
    # Routed experts of one token, on average.
    experts_per_token: float = 1
    # Tokens that compete for an expert: a sequence, a micro-batch, all ranks' micro-batches, or so many.
    pool: Pool = "batch"
    # Share of the old mean in the running mean of cutoffs; presets let it grow with their steps.
    decay: float = 0.999
    # Correct the running mean for its start at 0.
    debias: bool = True

    def __post_init__(self) -> None:
        check_experts(self.num_experts, self.experts_per_token)
        check_cutoff(self.pool, self.decay, self.debias)

    def init(self) -> CutoffState:
        return init_cutoff(self.num_experts, self.debias)

    def route(
        self, scores: Tensor, state: CutoffState, *, training: bool, group: dist.ProcessGroup | None = None
    ) -> Routing:
        """scores: (batch, time, experts) float32. In training z = 1{t ∈ Top_k(r_i)} per pool, else z = 1{r > c}."""
        c = cutoff(state)
        if not training:
            return route_by_cutoff(scores, c, self.experts_per_token)
        pools = form_pools(scores, self.pool, group)
        k, _, _ = bounds(pools.tokens, self.experts_per_token, self.num_experts, slack=0)
        (kth,) = kth_largest(pools.scores, [k], pools.group)
        return route_by_cut(scores, pools, kth, k=k, kth=kth, cutoff=c)

    def update(self, state: CutoffState, observation: Observation) -> CutoffState:
        return update_cutoff(state, observation, self.decay, self.debias)

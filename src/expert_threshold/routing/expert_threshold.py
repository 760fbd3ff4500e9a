"""Expert threshold: a token goes to every expert whose score exceeds that expert's cutoff (paper, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch.distributed as dist
from torch import Tensor

from .observation import Observation, Routing
from .options import check_cutoff, check_experts, is_number, is_whole, require
from .pools import (
    CutoffState,
    Pool,
    bounds,
    cutoff,
    follow_trend,
    form_pools,
    init_cutoff,
    route_by_cut,
    route_by_cutoff,
    update_cutoff,
)
from .selection import clamp, kth_largest

Estimator = Literal["mean", "trend"]


@dataclass(frozen=True)
class ExpertThreshold:
    """Load in expectation, causal: c_i is the running mean of past batches' k-th largest scores."""

    # Routed experts in a layer.
    num_experts: int = 16
    # Routed experts of one token, on average.
    experts_per_token: float = 1
    # Share β of the old mean in the running mean of cutoffs; presets let it grow with their steps.
    decay: float = 0.999
    # Optimizer steps of expert choice before the cutoffs decide; presets have a fifth of their steps, at most 4000.
    warmup_steps: int = 4000
    # Loads lie within k(1−s) and k(1+s) while training, with s this number; None is without bounds.
    capacity_slack: float | None = 0.5
    # Tokens whose k-th largest score is measured, and that bounds act over: a sequence, a micro-batch, all ranks'
    # micro-batches, or so many.
    pool: Pool = "global"
    # Correct the running mean for its start at 0; the paper's formula to the letter does not.
    debias: bool = True
    # How cutoffs follow those of batches: mean is the paper's running mean; trend is a running mean and slope, which
    # does not lag behind scores that drift: for runs of up to 2000 steps, with a decay of 0.6.
    estimator: Estimator = "mean"

    def __post_init__(self) -> None:
        check_experts(self.num_experts, self.experts_per_token)
        check_cutoff(self.pool, self.decay, self.debias)
        require(
            is_whole(self.warmup_steps, at_least=0),
            "warmup_steps",
            self.warmup_steps,
            "must be a whole number of at least 0; 0 is no warmup",
        )
        require(
            self.capacity_slack is None or is_number(self.capacity_slack, at_least=0),
            "capacity_slack",
            self.capacity_slack,
            "must be at least 0; None switches the bounds off",
        )
        require(self.estimator in get_args(Estimator), "estimator", self.estimator, "is unknown; use 'mean' or 'trend'")
        unbiased = self.debias or self.estimator == "mean"
        require(unbiased, "debias", self.debias, "is for estimator='mean'; a trend has no bias to leave in")

    def init(self) -> CutoffState:
        return init_cutoff(self.num_experts, self.debias)

    def route(
        self, scores: Tensor, state: CutoffState, *, training: bool, group: dist.ProcessGroup | None = None
    ) -> Routing:
        """scores: (batch, time, experts) float32. z = 1{r > c}; in training within the capacity bounds."""
        c = cutoff(state)
        if not training:
            return route_by_cutoff(scores, c, self.experts_per_token)
        pools = form_pools(scores, self.pool, group)
        k, k_min, k_max = bounds(pools.tokens, self.experts_per_token, self.num_experts, self.capacity_slack)
        kth, at_least, at_most = kth_largest(pools.scores, [k, k_min, k_max], pools.group)
        warmup = state.step < self.warmup_steps  # a tensor, so that the end of warmup changes no code path
        cut = clamp(c, at_least=kth.where(warmup, at_least), at_most=kth.where(warmup, at_most))
        return route_by_cut(scores, pools, cut, k=k, kth=kth, cutoff=c)

    def update(self, state: CutoffState, observation: Observation) -> CutoffState:
        if self.estimator == "trend":
            return follow_trend(state, observation, self.decay)
        return update_cutoff(state, observation, self.decay, self.debias)

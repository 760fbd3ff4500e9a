"""The base class of expert choice and expert threshold: both compare scores with a cutoff, a running mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .gates import Gated, PlainGate
from .observation import Observation
from .pools import CutoffState, Pool, as_ratio, batch_sketch, begin_run, bounds, cutoff, dial, init_cutoff
from .rule import Scope, Window

PAPER_STEPS = 19_073
"""Optimizer steps of the paper's d12 (Table "Training hyperparameters"), the run its decay and warmup were chosen for.
"""
PAPER_DECAY, PAPER_WARMUP_STEPS = 0.999, 4000
LEAST_DECAY = 0.9
"""Makes a running mean cover at least ten steps, however short the run."""


def scaled_decay(decay: float, steps: int) -> float:
    """Return the decay with which a mean covers the same share of a run of `steps` as `decay` does of PAPER_STEPS.

    1 − β' = (1 − β) · PAPER_STEPS / steps, with β' at least LEAST_DECAY and at most β; longer runs keep β.
    """
    share = 1 - (1 - decay) * PAPER_STEPS / max(steps, 1)
    return min(decay, max(LEAST_DECAY, round(share, 4)))


class ByCutoff(Gated):
    """A rule that averages its pools' k-th largest scores into cutoffs, by which inference routes."""

    pool: Pool
    decay: float
    debias: bool
    gate: PlainGate  # never a normalised one, since a token may have no expert

    @property
    def slack(self) -> float | None:
        """The slack s that keeps loads in training within k(1−s) and k(1+s); None: no bounds."""
        raise NotImplementedError

    def init(self) -> CutoffState:
        return init_cutoff(self.num_experts, self.debias)

    @classmethod
    def scaled(cls, steps: int, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a decay whose running mean covers the same share of the run as the paper's, but at least ten steps."""
        return {"decay": scaled_decay(PAPER_DECAY, steps)}

    def scope(self, training: bool) -> Scope:
        return self.pool_scope() if training else "token"

    def pool_scope(self) -> Scope:
        return self.pool if self.pool in ("sequence", "global") else "batch"

    def max_pairs(self, tokens: int, *, training: bool, ranks: int = 1) -> int | None:
        """Return ⌊tokens · experts_per_token · (1 + s)⌋, whatever the size of the pools; None without bounds."""
        return self._bound(tokens, self.num_experts, training, ranks)

    def max_load(self, tokens: int, *, training: bool, ranks: int = 1) -> int | None:
        return self._bound(tokens, 1, training, ranks)

    def _bound(self, tokens: int, experts: int, training: bool, ranks: int) -> int | None:
        if not training or self.slack is None or (ranks > 1 and self.pool == "global"):
            return None
        (each, per), (extra, unit) = as_ratio(self.experts_per_token), as_ratio(self.slack)
        most = tokens * experts * each * (unit + extra) // (self.num_experts * per * unit)
        return min(most, tokens * experts)

    def load_bounds(self, tokens: int) -> tuple[int, int] | None:
        if self.slack is None:
            return None
        return bounds(tokens, self.experts_per_token, self.num_experts, self.slack)[1:]

    def window(self, sequence: int, batch: int, step: int) -> Window:
        if isinstance(self.pool, int):
            return Window(self.pool, None)
        return Window(sequence if self.pool == "sequence" else batch, None)

    def thresholds(self, state: CutoffState) -> Tensor:
        return cutoff(state)

    def at_rate(self, state: CutoffState, rate: float) -> CutoffState:
        return dial(state, rate)

    def calibrated(self, state: CutoffState, observation: Observation) -> CutoffState:
        """Return the state with the observation's mean cutoffs and sketch, as if every step so far had seen them."""
        return CutoffState(
            mean=observation.batch_cutoff,
            weight=torch.ones_like(state.weight),
            step=state.step,
            sketch=batch_sketch(observation),
            sketch_weight=torch.ones_like(state.sketch_weight),
            slope=torch.zeros_like(state.slope),
        )

    def begin_run(self, state: CutoffState, experts_per_token: float) -> CutoffState:
        first = CutoffState(*(value.to(state.mean.device) for value in self.init()))
        return begin_run(state, first, None if experts_per_token == self.experts_per_token else self.experts_per_token)

    def describe(self, state: CutoffState) -> dict[str, Tensor]:
        return {"cutoff": cutoff(state)}

    def measure(self, state: CutoffState, observation: Observation) -> dict[str, Tensor]:
        """Return the batch cutoffs, their distance from the running means, and the effect of the bounds on loads
        (paper, Capacity Constraints): raw_usage, the share of tokens above the cutoff; saturation, tokens dropped over
        tokens above it; starvation, tokens filled in over k.
        """
        return {
            "batch_cutoff": observation.batch_cutoff,
            "cutoff_distance": (observation.batch_cutoff - cutoff(state)).abs(),
            "raw_usage": observation.raw_load / observation.tokens,
            "saturation": observation.dropped / observation.raw_load.clamp(min=1),
            "starvation": observation.filled / observation.target.clamp(min=1),
        }

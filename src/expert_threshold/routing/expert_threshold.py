"""Expert threshold: a token goes to every expert whose score exceeds that expert's cutoff (paper, Algorithm 1)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..option import Decay, NonNegative, NonNegativeInt, Positive, option
from .cutoffs import (
    PAPER_DECAY,
    PAPER_STEPS,
    PAPER_WARMUP_STEPS,
    ByCutoff,
    CutoffState,
    Pool,
    Pools,
    cutoff,
    follow_trend,
    scaled_decay,
)
from .gates import NULL_SCORES, Gate
from .observation import Observation
from .rule import Rule, Scope, Window
from .selection import Cut, clamp, kth_largest

Estimator = Literal["mean", "trend"]
# Longest run in which the trend beat the mean, and the trend's decay (docs/results/cutoffs-cpu).
SHORT_RUN, TREND_DECAY = 2000, 0.6


@dataclass(frozen=True)
class ExpertThreshold(ByCutoff):
    """Causal routing by cutoffs: the cutoff c_i is a running mean of the k-th largest scores in past batches.

    The paper's Algorithm 1, with its line numbers:

        3   z[t,i] = 1{r[t,i] > c_i}                            `cut` in training, `route` at inference
        5   c_i ← β c_i + (1 − β) · kth_largest(r[·,i], k)      `update`, once per optimizer step

    In training, each load is clamped to the bounds k(1 ± s). During warmup, both bounds equal k, as in expert choice.
    """

    decay: Decay = option(
        0.999,
        "Decay β of the running mean. Presets scale it to the number of steps. Short runs use the "
        "trend by default; setting a decay makes them use the running mean instead.",
    )
    warmup_steps: NonNegativeInt = option(
        4000,
        "Steps of expert choice before cutoffs decide. In presets, 4000 steps for runs at least as long as "
        "the paper's (19,073 steps), and one fifth of the steps otherwise.",
    )
    capacity_slack: NonNegative | None = option(
        0.5, "Slack s: in training, loads stay between k(1−s) and k(1+s). none disables the bounds."
    )
    pool: Pool = option(
        "global",
        "Tokens among which the k-th largest score is found: a sequence, a micro-batch, the micro-batches of all "
        "ranks, or a given number of tokens. The bounds apply to the same tokens.",
    )
    debias: bool = option(True, "Correct the running mean for its start at 0. The paper's formula does not.")
    estimator: Estimator = option(
        "mean",
        "How cutoffs are estimated. mean is the paper's running mean. trend adds a slope to keep up with drifting "
        "scores; it is meant for runs of up to 2000 steps, with a decay of 0.6.",
    )
    gate: Gate = option(
        "sigmoid",
        "Function that turns scores into gates. The paper uses sigmoid. softmax is taken over all experts and null "
        "scores. The other gates are normalised over the experts of a token, as in many published models.",
    )
    gate_scale: Positive = option(1.0, "Factor applied to all gates.")
    null_scores: NonNegativeInt = option(0, NULL_SCORES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.estimator == "trend" and not self.debias:
            raise ValueError(f"debias={self.debias} needs estimator='mean'; a trend is always unbiased")

    def cut(self, pools: Pools, ks: tuple[int, int, int], state: CutoffState) -> tuple[Cut, Cut]:
        """Return the cuts for z = 1{r > c} within the capacity bounds (line 3) and the cuts that take the k largest."""
        kth, at_least, at_most = kth_largest(pools.scores, ks, pools.group)
        warmup = state.step < self.warmup_steps  # a tensor, so that the end of warmup changes no code path
        at_least, at_most = kth.where(warmup, at_least), kth.where(warmup, at_most)
        return clamp(cutoff(state), at_least, at_most), kth

    def update(self, state: CutoffState, observation: Observation) -> CutoffState:
        """Return the state after line 5 of the algorithm."""
        if self.estimator == "trend":
            return follow_trend(state, observation, self.decay)
        return super().update(state, observation)

    @property
    def slack(self) -> float | None:
        return self.capacity_slack

    @property
    def warmup(self) -> int:
        return self.warmup_steps

    @property
    def looks_ahead(self) -> bool:
        """False, since only the capacity bounds look ahead after warmup."""
        return False

    @property
    def label(self) -> str:
        return ("ET" if self.warmup_steps else "ET no warmup") + self.label_of_gates()

    def scope(self, training: bool) -> Scope:
        """Return "token" even in training if there is neither a warmup nor a bound."""
        alone = self.warmup_steps == 0 and self.capacity_slack is None
        return "token" if alone else super().scope(training)

    def window(self, sequence: int, batch: int, step: int) -> Window:
        return super().window(sequence, batch, step)._replace(remembered=round(step / (1 - self.decay)))

    def calibration_rule(self, experts_per_token: float) -> Rule:
        """Return this rule with a warmup that never ends."""
        return replace(self, experts_per_token=experts_per_token, pool="batch", warmup_steps=sys.maxsize)

    @classmethod
    def scaled(cls, steps: int, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the paper's warmup and decay, scaled to the run: warmup lasts 4000 steps, or a fifth of a run shorter
        than the paper's. Runs of up to SHORT_RUN steps use the trend, since the mean would lag, unless `options` set
        its decay or switch debias off.
        """
        by_trend = steps <= SHORT_RUN and "decay" not in options and options.get("debias", True)
        estimator = options.get("estimator", "trend" if by_trend else "mean")
        return {
            "estimator": estimator,
            "decay": TREND_DECAY if estimator == "trend" else scaled_decay(PAPER_DECAY, steps),
            "warmup_steps": PAPER_WARMUP_STEPS if steps >= PAPER_STEPS else min(PAPER_WARMUP_STEPS, steps // 5),
        }

    @classmethod
    def cases(cls) -> Mapping[str, Rule]:
        return {
            "in warmup": cls(6, 1, capacity_slack=None),
            "no warmup": cls(6, 1, warmup_steps=0),
            "tight": cls(6, 2, warmup_steps=0, capacity_slack=0.1),
            "no slack": cls(6, 1, warmup_steps=0, capacity_slack=0),
            "no capacity": cls(6, 1, warmup_steps=0, capacity_slack=None),
            "past warmup": cls(6, 1, warmup_steps=2, decay=0.5),
            "fractional": cls(6, 0.7, warmup_steps=0, capacity_slack=0.25),
            "sequence": cls(6, 1, warmup_steps=0, pool="sequence"),
            "96 tokens": cls(6, 1, warmup_steps=0, pool=96),
            "trend": cls(6, 1, warmup_steps=2, decay=0.5, estimator="trend"),
            "softmax gates": cls(6, 1, warmup_steps=2, decay=0.5, gate="softmax"),
            "normalised gates": cls(6, 1, warmup_steps=2, decay=0.5, gate="sigmoid_normalised", gate_scale=2.5),
            "null scores": cls(6, 1, warmup_steps=2, decay=0.5, gate="softmax", null_scores=3),
            "not debiased": cls(6, 1, warmup_steps=0, decay=0.9, debias=False),
        }

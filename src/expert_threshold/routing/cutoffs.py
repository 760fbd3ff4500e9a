"""Pools and cutoffs, which expert choice and expert threshold have in common.

Both rules keep a running mean of the k-th largest scores in their pools, and use this mean as the cutoff at inference.
They also keep a running mean of score sketches, from which cutoffs for other rates can be computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..option import Count
from .gates import Gated
from .observation import Observation, Routing, observe, over_ranks
from .rule import Scope, Window
from .selection import Cut, take

Pool = Literal["sequence", "batch", "global"] | Count


# A sketch holds quantiles of each expert's score distribution at a few usages u. The usage is the share of tokens above
# a cutoff. Usages are evenly spaced in logit(u) = log(u / (1 − u)), in which quantiles of bell-shaped distributions are
# nearly linear. Beyond the last level, quantiles are extrapolated linearly.

STEP, LAST = 0.5, 7.5
"""Levels are logits of the usage, which range from −LAST to LAST, or from 0.06 % to 99.94 % of the tokens."""
LEVELS = round(2 * LAST / STEP) + 1
MOST_USAGE = 1 / (1 + math.exp(-LAST))
"""The largest usage at which quantiles are kept."""
SAMPLE = 2048
"""Maximum number of tokens to sort. Sorting them costs less than finding a training batch's k-th largest scores."""


@torch.no_grad()
def sketch(scores: Tensor) -> Tensor:
    """Return the quantiles (levels, experts) of scores (tokens, experts), in descending order.

    At most SAMPLE tokens are used. Their spacing is odd, so that every position is sampled if the length of sequences
    is a power of two. The h-th largest of n scores estimates the quantile at its expected usage, h / (n + 1). Without
    scores, all quantiles are zero.
    """
    if not len(scores):
        return scores.new_zeros(LEVELS, scores.shape[1])
    stride = -(-len(scores) // SAMPLE) | 1
    ordered = _ascending(scores.detach()[::stride])
    n = len(ordered)
    levels = torch.linspace(-LAST, LAST, LEVELS, dtype=scores.dtype, device=scores.device)
    place = ((-levels).sigmoid() * (n + 1) - 1).clamp(0, n - 1)  # counted from the smallest
    below = place.floor()
    lower, upper = ordered[below.long()], ordered[place.ceil().long()]
    return torch.lerp(lower, upper, (place - below)[:, None])


def quantile(sketch: Tensor, usage: float) -> Tensor:
    """Return the cutoffs (experts,) that a share `usage` of the tokens exceeds: no token at 0, and every token at 1."""
    if not 0 < usage < 1:
        return sketch.new_full(sketch.shape[1:], -math.inf if usage else math.inf)
    place = (math.log(usage / (1 - usage)) + LAST) / STEP
    i = min(max(math.floor(place), 0), LEVELS - 2)
    return sketch[i] + (place - i) * (sketch[i + 1] - sketch[i])


@torch.library.custom_op(f"{__name__.replace('.', '_')}::ascending", mutates_args=())
def _ascending(scores: Tensor) -> Tensor:
    """Return each expert's scores in ascending order. torch.compile treats this function as opaque."""
    if scores.device.type != "cpu":
        return scores.sort(dim=0).values
    columns = scores.numpy().T.copy()  # numpy sorts with vector instructions; torch does not
    columns.sort(axis=1)
    return torch.from_numpy(columns).T.contiguous()


@_ascending.register_fake
def _(scores: Tensor) -> Tensor:
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


class CutoffState(NamedTuple):
    """Running mean of the batch cutoffs, debiased like Adam's moments: the cutoff is mean / weight + slope."""

    mean: Tensor  # (experts,) float32
    weight: Tensor  # () float32, the share of the mean that comes from data; 1 when not debiased
    step: Tensor  # () int64, optimizer steps counted by `update_cutoff`
    sketch: Tensor  # (levels, experts) float32, running mean of the batch sketches, always debiased
    sketch_weight: Tensor  # () float32, weight of the sketch; 0 before the first update
    slope: Tensor  # (experts,) float32, expected change of the mean by the next step; 0 unless a trend is followed


def cutoff(state: CutoffState) -> Tensor:
    """Return the cutoffs (experts,) that scores are compared with."""
    return torch.where(state.weight > 0, state.mean / state.weight, 0.0) + state.slope


def dial(state: CutoffState, rate: float) -> CutoffState:
    """Return the state whose cutoffs send a token to `rate` experts on average, using all experts equally.

    rate: between 0 and num_experts. Raises ValueError if it is out of range, or if the state has no sketch.
    """
    num_experts = len(state.mean)
    if not 0 <= rate <= num_experts:
        raise ValueError(f"rate={rate} must be between 0 and num_experts={num_experts} routed experts per token")
    if state.sketch_weight == 0:
        raise ValueError(f"rate={rate} needs a sketch of scores, which this state lacks; create one with et calibrate")
    cutoffs = quantile(state.sketch / state.sketch_weight, rate / num_experts)
    return state._replace(mean=cutoffs, weight=torch.ones_like(state.weight), slope=torch.zeros_like(state.slope))


@torch.no_grad()
def update_cutoff(state: CutoffState, observation: Observation, decay: float, debias: bool) -> CutoffState:
    """Return the state after the update c ← β c + (1−β) · batch cutoff of one step (paper, Algorithm 1, line 5).

    If the step formed no pool, the state does not change. The state may come from a run with another estimator: the
    mean continues from that run's cutoff, whatever its weight and slope.
    """
    seen = observation.pools > 0
    # Both forms of the mean start from the state's current cutoff, including a trend's slope.
    before = state.mean + state.weight * state.slope if debias else cutoff(state)
    mean = decay * before + (1 - decay) * observation.batch_cutoff
    weight = decay * state.weight + (1 - decay) if debias else torch.ones_like(state.weight)
    sketch = decay * state.sketch + (1 - decay) * batch_sketch(observation)
    sketch_weight = decay * state.sketch_weight + (1 - decay)
    new = CutoffState(mean, weight, state.step + 1, sketch, sketch_weight, torch.zeros_like(state.slope))
    return CutoffState(*(a.where(seen, b) for a, b in zip(new, state, strict=True)))


@torch.no_grad()
def follow_trend(state: CutoffState, observation: Observation, decay: float) -> CutoffState:
    """Return the state after one step of Brown's double exponential smoothing. If scores drift, it does not lag behind,
    whereas the running mean lags by β / (1−β) steps.

    With cutoff c and batch cutoff b: l ← c + (1−β)(b − c), s ← s + g (l − l' − s), c ← l + s. The gain g = (1−√β) /
    (1+√β) gives critical damping: n steps after a jump, the error has decayed like n √β ⁿ.
    """
    updated = update_cutoff(state, observation, decay, debias=True)
    started, seen = state.weight > 0, observation.pools > 0
    forecast = cutoff(state).where(started, observation.batch_cutoff)
    level = forecast + (1 - decay) * (observation.batch_cutoff - forecast)
    rise = level - state.mean / state.weight  # rise of the level; the weight is below 1 after a debiased mean
    slope = state.slope + (rise - state.slope) * ((1 - decay**0.5) / (1 + decay**0.5))
    return updated._replace(
        mean=level.where(seen, state.mean),
        weight=torch.ones_like(state.weight).where(seen, state.weight),
        slope=slope.where(seen & started, state.slope),
    )


def batch_sketch(observation: Observation) -> Tensor:
    """Return the mean sketch of a batch (levels, experts), weighted by tokens, or NaN if no pool was formed."""
    return observation.sketch_sum / observation.tokens


class Pools(NamedTuple):
    """Scores grouped into pools of tokens that compete with each other."""

    scores: Tensor  # (pools, tokens, experts) of this rank, detached, since selection carries no gradient
    tokens: int  # tokens in one pool, over all ranks
    group: dist.ProcessGroup | None  # the ranks that share the one pool; None if pools are local to this rank


def form_pools(scores: Tensor, pool: Pool, group: dist.ProcessGroup | None) -> Pools:
    """Split scores (batch, time, experts) into pools. An empty batch has no pools.

    Raises ValueError if `pool` is a number of tokens that does not divide the batch.
    """
    batch, time, experts = scores.shape
    if isinstance(pool, int) and (batch * time) % pool:
        raise ValueError(
            f"pool={pool} does not divide the batch of {batch} × {time} = {batch * time} tokens; "
            f"use a divisor of {batch * time}, 'sequence', 'batch' or 'global'"
        )
    size = pool if isinstance(pool, int) else time if pool == "sequence" else batch * time
    group = group if pool == "global" else None
    tokens = size if batch * time else 0
    if group is not None:
        tokens = int(over_ranks(torch.tensor(tokens, device=scores.device), group))
    if tokens == 0:
        return Pools(scores.detach().reshape(0, 0, experts), 0, None)
    pools = 1 if pool in ("batch", "global") else batch * time // size
    return Pools(scores.detach().reshape(pools, size, experts), tokens, group)


def bounds(tokens: int, experts_per_token: float, num_experts: int, slack: float | None) -> tuple[int, int, int]:
    """Return k = ⌊tokens · experts_per_token / num_experts⌋, k_min = ⌊k(1−s)⌋ and k_max = ⌊k(1+s)⌋ for a pool.

    The floors are computed from the decimal forms of the numbers, not from their binary approximations. Raises
    ValueError if k = 0, unless there are no tokens.
    """
    numerator, denominator = as_ratio(experts_per_token)
    k = tokens * numerator // (denominator * num_experts)
    if k == 0 and tokens > 0:
        raise ValueError(
            f"pool of {tokens} tokens: k = ⌊{tokens} · {experts_per_token} / {num_experts}⌋ = 0, so experts would get "
            f"no tokens; use a pool of at least {-(-num_experts * denominator // numerator)} tokens, a larger "
            f"experts_per_token or fewer experts"
        )
    if slack is None:
        return k, 0, tokens
    s, unit = as_ratio(slack)
    return k, max(k * (unit - s) // unit, 0), min(k * (unit + s) // unit, tokens)


def as_ratio(number: float) -> tuple[int, int]:
    """Return the numerator and denominator of the number's decimal form; 0.1 gives (1, 10)."""
    return Fraction(str(number)).as_integer_ratio()


PAPER_STEPS = 19_073
"""Optimizer steps of the paper's d12 (Table "Training hyperparameters"), for which decay and warmup were chosen."""
PAPER_DECAY, PAPER_WARMUP_STEPS = 0.999, 4000
LEAST_DECAY = 0.9
"""The smallest scaled decay, with which the running mean of even a short run covers ten steps."""


def scaled_decay(decay: float, steps: int) -> float:
    """Return the decay whose running mean covers the same share of `steps` as `decay` covers of PAPER_STEPS.

    1 − β' = (1 − β) · PAPER_STEPS / steps, with β' at least LEAST_DECAY and at most β; longer runs keep β.
    """
    share = 1 - (1 - decay) * PAPER_STEPS / max(steps, 1)
    return min(decay, max(LEAST_DECAY, round(share, 4)))


class ByCutoff(Gated):
    """Base class of rules that average the k-th largest scores of their pools into cutoffs for inference."""

    pool: Pool
    decay: float
    debias: bool

    @property
    def slack(self) -> float | None:
        """The slack s, which keeps loads in training between k(1−s) and k(1+s), or None if loads are unbounded."""
        raise NotImplementedError

    def cut(self, pools: Pools, ks: tuple[int, int, int], state: CutoffState) -> tuple[Cut, Cut]:
        """Return each pool's cut in training and the cut that takes its k largest scores. ks: k, k_min and k_max."""
        raise NotImplementedError

    def route(
        self, scores: Tensor, state: CutoffState, *, training: bool, group: dist.ProcessGroup | None = None
    ) -> Routing:
        """Route by `cut` in training and by z = 1{r > c} at inference (paper, Eq. 6; Algorithm 1, line 3).

        scores: (batch, time, num_scores) float32. Drops and fills are relative to the cutoff c.
        """
        own, cutoffs = self.without_nulls(scores), cutoff(state)
        tokens, nothing = scores[..., 0].numel(), torch.zeros_like(cutoffs)
        if training:
            pools = form_pools(own, self.pool, group)
            ks = bounds(pools.tokens, self.experts_per_token, self.num_experts, self.slack)
            cut, kth = self.cut(pools, ks, state)
            taken = take(pools.scores, cut)
            above = (pools.scores > cutoffs).sum(1)
            excess = above - taken.sum(1)  # (pools, experts): tokens dropped or, where negative, filled in
            flat = pools.scores.flatten(0, 1)
            assignment, target = taken.reshape(own.shape), ks[0] * tokens / max(pools.tokens, 1)
            sums = {
                "pools": above.new_full((), len(pools.scores)),
                "cutoff_sum": kth.score.sum(0),  # not the clamped cut: if scores drift, the mean must leave the bounds
                "raw_load": above.sum(0),
                "dropped": excess.clamp(min=0).sum(0),
                "filled": (-excess).clamp(min=0).sum(0),
                "sketch_sum": sketch(flat) * len(flat),
            }
        else:
            # `Router.infer`, with thresholds for each row, and the decoder in `kernels/cpu` make this comparison, too.
            assignment, target = own > cutoffs, tokens * self.experts_per_token / self.num_experts
            sums = {
                "pools": torch.zeros((), dtype=torch.int64, device=scores.device),
                "cutoff_sum": nothing,
                "raw_load": assignment.flatten(0, -2).sum(0),
                "dropped": nothing.long(),
                "filled": nothing.long(),
                "sketch_sum": scores.new_zeros(LEVELS, self.num_experts),
            }
        gates = self.gates_of(scores, assignment)
        observation = observe(scores, assignment, gates, target=target, **sums)
        return Routing(scores=scores, gates=gates, assignment=assignment, observation=observation)

    def update(self, state: CutoffState, observation: Observation) -> CutoffState:
        return update_cutoff(state, observation, self.decay, self.debias)

    def init(self) -> CutoffState:
        """Return the state before the first update, in which all cutoffs are 0."""
        nothing = torch.zeros(LEVELS, self.num_experts, dtype=torch.float32)
        weight = torch.tensor(0.0 if self.debias else 1.0, dtype=torch.float32)
        mean, slope, sketch_weight = nothing[0].clone(), nothing[0].clone(), torch.tensor(0.0, dtype=torch.float32)
        return CutoffState(mean, weight, torch.tensor(0), nothing, sketch_weight, slope)

    @classmethod
    def scaled(cls, steps: int, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a decay whose running mean covers the same share of a run as in the paper, but at least ten steps."""
        return {"decay": scaled_decay(PAPER_DECAY, steps)}

    def scope(self, training: bool) -> Scope:
        return self.pool_scope() if training else "token"

    def pool_scope(self) -> Scope:
        return self.pool if self.pool in ("sequence", "global") else "batch"

    def max_pairs(self, tokens: int, *, training: bool, ranks: int = 1) -> int | None:
        """Return ⌊tokens · experts_per_token · (1 + s)⌋, for pools of any size, or None if loads are unbounded."""
        if not training or self.slack is None or (ranks > 1 and self.pool == "global"):
            return None
        (each, per), (extra, unit) = as_ratio(self.experts_per_token), as_ratio(self.slack)
        return min(tokens * each * (unit + extra) // (per * unit), tokens * self.num_experts)

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
        one, slope = torch.ones_like(state.weight), torch.zeros_like(state.slope)
        mean, sketch = observation.batch_cutoff, batch_sketch(observation)
        return CutoffState(mean, one, state.step, sketch, one.clone(), slope)

    def begin_run(self, state: CutoffState, experts_per_token: float) -> CutoffState:
        """Return the initial state of a new run that keeps the cutoffs and the sketch of a run with any estimator.

        If experts_per_token changed, cutoffs are read from the sketch, if any, but never −∞, which a mean would keep.
        """
        first = CutoffState(*(value.to(state.mean.device) for value in self.init()))
        if experts_per_token != self.experts_per_token:
            rate = min(self.experts_per_token, MOST_USAGE * self.num_experts)
            state = dial(state, rate) if state.sketch_weight > 0 else first
        weight = state.weight.maximum(first.weight)  # a mean that is not debiased always has weight 1
        return state._replace(mean=weight * cutoff(state), weight=weight, step=first.step, slope=first.slope)

    def describe(self, state: CutoffState) -> dict[str, Tensor]:
        return {"cutoff": cutoff(state)}

    def measure(self, state: CutoffState, observation: Observation) -> dict[str, Tensor]:
        """Return the batch cutoffs, their distance from the running means, and the effect of the bounds on loads
        (paper, Capacity Constraints): raw_usage is the share of tokens above the cutoff, saturation the share of these
        tokens that are dropped, and starvation the number of tokens filled in, divided by k.
        """
        return {
            "batch_cutoff": observation.batch_cutoff,
            "cutoff_distance": (observation.batch_cutoff - cutoff(state)).abs(),
            "raw_usage": observation.raw_load / observation.tokens,
            "saturation": observation.dropped / observation.raw_load.clamp(min=1),
            "starvation": observation.filled / observation.target.clamp(min=1),
        }

"""The contract of every rule: three required pure methods, and optional ones with safe defaults."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, NamedTuple

import numpy as np
import torch.distributed as dist
from torch import Tensor

from ..option import Count, alternatives, kinds_of, require_kind, require_valid
from .observation import Observation, Routing

Scope = Literal["token", "sequence", "batch", "global"]


class Window(NamedTuple):
    """The numbers of tokens that a rule looks at while training."""

    pool: int | None  # tokens that compete for an expert, or over which load is measured; None if each is independent
    remembered: int | None  # tokens covered by the running mean that decides, N / (1 − β); None without a running mean


class Rule(ABC):
    """Turns scores into an assignment and gates: a frozen dataclass with the methods `init`, `route` and `update`.

    A subclass has the fields num_experts and experts_per_token, the target mean fanout. Its fields become command-line
    options, with the text of `option(default, text)` as help, and keys of config.json. All methods are pure. With
    training=False a rule is causal: a token's routing depends on nothing after it.

    The other methods describe the rule to the rest of the package. Their defaults are safe for every rule: the caller
    falls back to a slower, general path or omits the feature.
    """

    num_experts: int
    experts_per_token: float

    def __post_init__(self) -> None:
        """Raise ValueError if an option's value violates its type; a rule with more checks calls this first."""
        kinds = kinds_of(type(self))
        for field in fields(self):  # type: ignore[arg-type]  # a subclass is a dataclass
            value = getattr(self, field.name)
            value = value.item() if isinstance(value, np.generic) else value
            if alternatives(kinds[field.name])[0][0] is int and isinstance(value, float) and value.is_integer():
                value = int(value)  # another rule's option of the same name may allow any number
            object.__setattr__(self, field.name, value)
        require_kind("num_experts", self.num_experts, Count)
        require_kind("experts_per_token", self.experts_per_token, kinds["experts_per_token"])
        if not 0 < self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} must be above 0 and at most num_experts={self.num_experts}"
            )
        require_valid(type(self), {field.name: getattr(self, field.name) for field in fields(self)})  # type: ignore[arg-type]

    @abstractmethod
    def init(self) -> Any:
        """Return the state before the first step, a NamedTuple of tensors, possibly empty."""

    @abstractmethod
    def route(self, scores: Tensor, state: Any, *, training: bool, group: dist.ProcessGroup | None = None) -> Routing:
        """Return the routing of scores (batch, time, num_scores) float32, with its observation.

        group: the ranks over which a global pool is formed, or a global load counted. Raises ValueError for a batch
        that cannot be routed in training, such as one whose size is not a multiple of the pool size.
        """

    @abstractmethod
    def update(self, state: Any, observation: Observation) -> Any:
        """Return the state after an optimizer step that saw `observation`, summed over micro-batches and ranks."""

    @classmethod
    def cases(cls) -> Mapping[str, Rule]:
        """Return rules to test, by name: one for every way in which options change the rule's behaviour."""
        return {"defaults": cls()}

    @classmethod
    def summary(cls) -> str:
        """Return a one-sentence summary of the rule, the first line of its docstring."""
        return (cls.__doc__ or f"{cls.__name__}.").strip().splitlines()[0]

    @classmethod
    def scaled(cls, steps: int, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return defaults for a run of `steps` optimizer steps. options: what the user set, which takes precedence."""
        return {}

    @property
    def label(self) -> str:
        """The name in tables and figures."""
        return type(self).__name__

    def label_of(self, pool: int | None) -> str:
        """Return the name in tables and figures for a pool of `pool` tokens; None if the rule has no pools."""
        return self.label

    @property
    def num_scores(self) -> int:
        """The width of the score matrix: num_experts, plus any null slots or null scores, which come last."""
        return self.num_experts

    @property
    def sigmoid_gates(self) -> bool:
        """True guarantees that gates are exactly σ(scores), so that kernels may compute them."""
        return False

    @property
    def softmax_gates(self) -> bool:
        """True guarantees that gates are exactly the experts' columns of softmax(scores) over all num_scores."""
        return False

    def scope(self, training: bool) -> Scope:
        """Return whose scores decide where a token goes: the token's own, its sequence's, this rank's micro-batch's or
        all ranks'. In inference, the scope is "token", or "sequence" up to and including this token.
        """
        return "batch" if training else "sequence"

    @property
    def warmup(self) -> int:
        """The number of warmup steps, in which training routes differently than afterwards."""
        return 0

    @property
    def looks_ahead(self) -> bool:
        """True if training selects by other tokens' scores until the end of a run, so that training and inference
        losses differ.
        """
        return self.scope(training=True) != "token"

    def pool_scope(self) -> Scope | None:
        """Return the scope of training statistics that are not sums over tokens, such as the k-th largest score or the
        loads in a loss; None if there are none.
        """
        return None

    def max_pairs(self, tokens: int, *, training: bool, ranks: int = 1) -> int | None:
        """Return a bound on the token-expert pairs of one rank's tokens; None if they must be counted.

        ranks: the size of the group over which a global pool is formed.
        """
        return None

    @property
    def aims_at_fanout(self) -> bool:
        """Whether the rule steers the mean fanout towards experts_per_token."""
        return True

    def load_bounds(self, tokens: int) -> tuple[int, int] | None:
        """Return the minimum and maximum load of an expert for a pool of `tokens`, in training after any warmup; None
        if loads are unbounded.
        """
        return None

    def window(self, sequence: int, batch: int, step: int) -> Window:
        """Return how many tokens the rule looks at in training. sequence, batch, step: tokens in a sequence, a
        micro-batch and an optimizer step.
        """
        return Window(None, None)

    def thresholds(self, state: Any) -> Tensor | None:
        """Return thresholds (num_experts,) if inference assigns exactly where an expert's score exceeds its threshold;
        None otherwise.
        """
        return None

    def biased_top_k(self, state: Any) -> tuple[Tensor, int] | None:
        """Return bias (num_experts,) and k if inference takes exactly the k largest of scores + bias, ties to the lower
        expert; None otherwise.
        """
        return None

    def at_rate(self, state: Any, rate: float) -> Any:
        """Return a state with which inference has a mean fanout of `rate`.

        Raises ValueError if the rate is not between 0 and num_experts, or if the rule cannot change its rate.
        """
        raise ValueError(
            f"rate={rate} needs cutoffs, which {self.label} does not have; use a model whose rule has thresholds, such "
            "as expert_threshold or expert_choice"
        )

    def calibration_rule(self, experts_per_token: float) -> Rule:
        """Return the rule that measures cutoffs in calibration: expert choice over each micro-batch, with this rule's
        gates and state.

        Raises ValueError if the rule has no thresholds.
        """
        raise ValueError(
            f"{self.label} has no method calibration_rule to measure cutoffs with; name a run whose rule has one, "
            "such as expert_threshold or expert_choice"
        )

    def calibrated(self, state: Any, observation: Observation) -> Any:
        """Return the state whose thresholds are `observation`'s mean batch cutoffs, measured by `calibration_rule`.

        Raises ValueError if the rule has no thresholds.
        """
        raise ValueError(
            f"{self.label} has no cutoffs to calibrate; name a run whose rule has thresholds, such as expert_threshold "
            "or expert_choice"
        )

    def can_start_from(self, other: Rule) -> bool:
        """Return True if a new run may start from the other rule's state: same kind of state, same units."""
        return type(self.init()) is type(other.init())

    def begin_run(self, state: Any, experts_per_token: float) -> Any:
        """Return a new run's initial state from `state`, whose rule had `experts_per_token` and is one that this rule
        `can_start_from`. Learned values are kept; step counts are reset.
        """
        return state

    def describe(self, state: Any) -> dict[str, Tensor]:
        """Return the tensors of the state that metrics and figures show, by name: cutoffs, biases, λ, p."""
        return {}

    def measure(self, state: Any, observation: Observation) -> dict[str, Tensor]:
        """Return one optimizer step's metrics beyond its loads, by name, each () or (experts,).

        state: the state that routed the step.
        """
        return {}

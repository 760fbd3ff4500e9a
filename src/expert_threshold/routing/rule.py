"""The interface of routing rules: three required methods, all pure, and optional methods with safe defaults."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import numpy as np
import torch.distributed as dist
from torch import Tensor

from ..option import Count, alternatives, kinds_of, option, require_kind, require_valid
from .observation import Observation, Routing

Scope = Literal["token", "sequence", "batch", "global"]
INSTEAD = "use a model whose rule does, such as expert_threshold or expert_choice"


class Window(NamedTuple):
    """The numbers of tokens that a rule looks at during training."""

    pool: int | None  # tokens that compete for an expert, or over which load is measured; None if they are independent
    remembered: int | None  # tokens covered by the running mean that decides, N / (1 − β); None without a running mean


@dataclass(frozen=True)
class Rule(ABC):
    """Base class of routing rules: frozen dataclasses whose method `route` turns scores into an assignment and gates.

    experts_per_token is the target mean fanout. A subclass may redefine its fields and add others. All fields become
    keys of config.json and command-line options, whose help is the text given to `option`. All methods are pure. With
    training=False, a rule is causal: the routing of a token does not depend on later tokens.

    The other methods describe the rule to the rest of the package. Their defaults are safe for every rule: the caller
    falls back to a slower, general path or omits the feature.
    """

    num_experts: Count = option(16, "Routed experts per layer.")
    experts_per_token: float = option(1, "Mean routed experts per token.")

    def __post_init__(self) -> None:
        """Raise ValueError if an option does not match its type. Subclasses with more checks call this method first."""
        kinds = kinds_of(type(self))
        for field in fields(self):
            value = getattr(self, field.name)
            value = value.item() if isinstance(value, np.generic) else value
            value = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
            if alternatives(kinds[field.name])[0][0] is int and isinstance(value, float) and value.is_integer():
                value = int(value)  # another rule's option of the same name may allow any number
            object.__setattr__(self, field.name, value)
        require_kind("num_experts", self.num_experts, Count)
        require_kind("experts_per_token", self.experts_per_token, kinds["experts_per_token"])
        if not 0 < self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} must be above 0 and at most num_experts={self.num_experts}"
            )
        require_valid(type(self), {field.name: getattr(self, field.name) for field in fields(self)})

    @abstractmethod
    def init(self) -> Any:
        """Return the state before the first step, a NamedTuple of tensors, possibly empty."""

    @abstractmethod
    def route(self, scores: Tensor, state: Any, *, training: bool, group: dist.ProcessGroup | None = None) -> Routing:
        """Route float32 scores of shape (batch, time, num_scores) and observe the result.

        group: the ranks that share a global pool or a global load. Raises ValueError if a training batch cannot be
        routed, for example because its size is not a multiple of the pool size.
        """

    @abstractmethod
    def update(self, state: Any, observation: Observation) -> Any:
        """Return the state after an optimizer step that saw `observation`, summed over micro-batches and ranks."""

    @classmethod
    def cases(cls) -> Mapping[str, Rule]:
        """Return named instances for tests, one for every way in which options change the rule's behaviour."""
        return {"defaults": cls()}

    @classmethod
    def summary(cls) -> str:
        """Return a one-sentence summary of the rule, the first line of its docstring."""
        return (cls.__doc__ or f"{cls.__name__}.").strip().splitlines()[0]

    @classmethod
    def scaled(cls, steps: int, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return defaults for a run of `steps` optimizer steps. `options` are set by the user and take precedence."""
        return {}

    @property
    def label(self) -> str:
        """The name of the rule in tables and figures."""
        return type(self).__name__

    def label_of(self, pool: int | None) -> str:
        """Return the name in tables and figures if pools have `pool` tokens; pass None for a rule without pools."""
        return self.label

    @property
    def num_scores(self) -> int:
        """The width of the score matrix: num_experts, plus any null slots or null scores, which come last."""
        return self.num_experts

    @property
    def sigmoid_gates(self) -> bool:
        """Whether gates are guaranteed to be exactly σ(scores), so that kernels may compute them."""
        return False

    @property
    def softmax_gates(self) -> bool:
        """Whether gates are guaranteed to be exactly the experts' columns of softmax(scores) over all num_scores."""
        return False

    def scope(self, training: bool) -> Scope:
        """Return the tokens whose scores decide where a token goes: the token itself, its sequence, this rank's
        micro-batch or the micro-batches of all ranks. At inference, a "sequence" only extends to the token itself.
        """
        return "batch" if training else "sequence"

    @property
    def warmup(self) -> int:
        """The number of warmup steps, during which training routes tokens differently than afterwards."""
        return 0

    @property
    def looks_ahead(self) -> bool:
        """Whether routing in training depends on other tokens' scores until the end of a run, so that training and
        inference losses differ.
        """
        return self.scope(training=True) != "token"

    def pool_scope(self) -> Scope | None:
        """Return the scope of training statistics that are not sums over tokens, such as the k-th largest score or the
        loads in a loss, or None if there are no such statistics.
        """
        return None

    def max_pairs(self, tokens: int, *, training: bool, ranks: int = 1) -> int | None:
        """Return an upper bound on the token-expert pairs of one rank, or None if they must be counted.

        ranks: the number of ranks that share a global pool.
        """
        return None

    @property
    def aims_at_fanout(self) -> bool:
        """Whether the rule steers the mean fanout towards experts_per_token."""
        return True

    def load_bounds(self, tokens: int) -> tuple[int, int] | None:
        """Return the minimum and maximum load of an expert in a pool of `tokens` tokens, in training after any warmup,
        or None if loads are unbounded.
        """
        return None

    def window(self, sequence: int, batch: int, step: int) -> Window:
        """Return how many tokens the rule looks at during training. The arguments are the numbers of tokens in a
        sequence, a micro-batch and an optimizer step.
        """
        return Window(None, None)

    def thresholds(self, state: Any) -> Tensor | None:
        """Return the thresholds (num_experts,) if inference assigns a token to an expert exactly when the score exceeds
        the expert's threshold; otherwise, return None.
        """
        return None

    def biased_top_k(self, state: Any) -> tuple[Tensor, int] | None:
        """Return a bias (num_experts,) and k if inference takes exactly the k largest of scores + bias, with ties going
        to the lower expert; otherwise, return None.
        """
        return None

    def at_rate(self, state: Any, rate: float) -> Any:
        """Return a state for which the mean fanout at inference is `rate`.

        Raises ValueError if the rate is not between 0 and num_experts, or if the rule cannot change its rate.
        """
        raise ValueError(f"rate={rate} needs cutoffs, which {self.label} does not have; {INSTEAD}")

    def calibration_rule(self, experts_per_token: float) -> Rule:
        """Return the rule that measures cutoffs during calibration: expert choice over each micro-batch, with the gates
        and the state of this rule.

        Raises ValueError if the rule has no thresholds.
        """
        raise ValueError(f"{self.label} does not define calibration_rule, which measures cutoffs; {INSTEAD}")

    def calibrated(self, state: Any, observation: Observation) -> Any:
        """Return a state whose thresholds are the mean batch cutoffs that `calibration_rule` measured.

        Raises ValueError if the rule has no thresholds.
        """
        raise ValueError(f"{self.label} has no cutoffs to calibrate; {INSTEAD}")

    def can_start_from(self, other: Rule) -> bool:
        """Return True if a new run can start from the other rule's state, which must have the same type and units."""
        return type(self.init()) is type(other.init())

    def begin_run(self, state: Any, experts_per_token: float) -> Any:
        """Return the initial state of a new run that starts from `state`, whose own rule had `experts_per_token`.
        Learned values are kept; step counts are reset.
        """
        return state

    def describe(self, state: Any) -> dict[str, Tensor]:
        """Return named tensors of the state that metrics and figures show, such as cutoffs, biases, λ and p."""
        return {}

    def measure(self, state: Any, observation: Observation) -> dict[str, Tensor]:
        """Return named metrics of an optimizer step other than its loads, each of shape () or (experts,).

        state: the state with which the step was routed.
        """
        return {}

"""The contract of every rule: three pure methods that it must have, and questions that it may answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch import Tensor

from .observation import Observation, Routing

Scope = Literal["token", "sequence", "batch", "global"]


class Window(NamedTuple):
    """Tokens that a rule looks at while training."""

    pool: int | None  # that compete for an expert, or over which load is measured; None: each token by itself
    remembered: int | None  # that what decides is a mean over, N / (1 − β); None where nothing is averaged


class Rule(ABC):
    """How scores become an assignment and gates: a frozen dataclass with the methods `init`, `route` and `update`.

    A subclass has the fields num_experts and experts_per_token, the mean fanout it aims at. Its fields are options: of
    commands, with the comment above each as help, and of config.json. All methods are pure. With training=False a rule
    is causal: what a token gets depends on nothing after it.

    The other methods answer what the rest of the package wants to know. Their defaults are safe for every rule: what is
    not answered is computed in the slower, general way or is left out.
    """

    num_experts: int
    experts_per_token: float

    @abstractmethod
    def init(self) -> Any:
        """Return the state before the first step, a NamedTuple of tensors, perhaps empty."""

    @abstractmethod
    def route(self, scores: Tensor, state: Any, *, training: bool, group: dist.ProcessGroup | None = None) -> Routing:
        """Assign scores (batch, time, num_scores) float32 to experts, and observe; changes nothing.

        group: the ranks over which a global pool is formed, or a global load counted. Raises ValueError for a batch
        that cannot be routed in training, such as one that its pools do not divide.
        """

    @abstractmethod
    def update(self, state: Any, observation: Observation) -> Any:
        """Return the state after an optimizer step that saw `observation`, summed over micro-batches and ranks."""

    @classmethod
    def cases(cls) -> Mapping[str, Rule]:
        """Return rules to test, by name: every way that options change what the rule does."""
        return {"defaults": cls()}

    @classmethod
    def summary(cls) -> str:
        """Return what the rule does in one sentence: the first line of its docstring."""
        return (cls.__doc__ or f"{cls.__name__}.").strip().splitlines()[0]

    @classmethod
    def scaled(cls, steps: int, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return defaults that suit a run of so many optimizer steps. options: those that are given, which win."""
        return {}

    @property
    def label(self) -> str:
        """The name in tables and figures."""
        return type(self).__name__

    def label_of(self, pool: int | None) -> str:
        """Return the name in tables and figures where a pool has so many tokens; None where there are no pools."""
        return self.label

    @property
    def num_scores(self) -> int:
        """The width of the score matrix: num_experts, or more where some slots compute nothing; these come last."""
        return self.num_experts

    @property
    def sigmoid_gates(self) -> bool:
        """True promises that gates are σ(scores) and nothing else, so that kernels may compute them."""
        return False

    def scope(self, training: bool) -> Scope:
        """Return whose scores decide where a token goes: its own, those of its sequence, of this rank's micro-batch,
        or of all ranks'. In inference it is "token" or "sequence", and of that only tokens up to this one.
        """
        return "batch" if training else "sequence"

    @property
    def warmup(self) -> int:
        """The optimizer steps in which training routes otherwise than after them."""
        return 0

    @property
    def looks_ahead(self) -> bool:
        """True if training chooses by the scores of other tokens to the end of a run, so that the loss of inference is
        another one.
        """
        return self.scope(training=True) != "token"

    def pool_scope(self) -> Scope | None:
        """Return over whose scores training takes statistics that are no sums over tokens, such as the k-th largest
        score, or loads in a loss; None where there are none.
        """
        return None

    def max_pairs(self, tokens: int, *, training: bool, ranks: int = 1) -> int | None:
        """Return a bound on the token-expert pairs of one rank's tokens; None if only counting can tell.

        ranks: those of the group that a global pool is formed over.
        """
        return None

    def max_load(self, tokens: int, *, training: bool, ranks: int = 1) -> int | None:
        """Return a bound on the tokens of one rank that one expert gets; None if only counting can tell."""
        return None

    def load_bounds(self, tokens: int) -> tuple[int, int] | None:
        """Return the fewest and the most tokens of a pool of so many that an expert gets in training, after any warmup;
        None if there are no such bounds.
        """
        return None

    def window(self, sequence: int, batch: int, step: int) -> Window:
        """Return the tokens looked at while training: sequence, batch and step are a sequence's, a micro-batch's and an
        optimizer step's.
        """
        return Window(None, None)

    def thresholds(self, state: Any) -> Tensor | None:
        """Return (num_experts,) if inference is scores > thresholds and nothing else; None otherwise."""
        return None

    def biased_top_k(self, state: Any) -> tuple[Tensor, int] | None:
        """Return bias (num_experts,) and k if inference takes the k largest of scores + bias, ties to the lower expert,
        and nothing else; None otherwise.
        """
        return None

    def at_rate(self, state: Any, rate: float) -> Any:
        """Return a state with which inference sends a token to `rate` experts on average.

        Raises ValueError if the rate lies outside 0 and num_experts, or the rule cannot aim at another one.
        """
        raise ValueError(
            f"rate={rate} needs cutoffs, which {self.label} does not have; use a model whose rule has thresholds, such "
            "as expert_threshold or expert_choice"
        )

    def calibrated(self, state: Any, observation: Observation) -> Any:
        """Return the state whose thresholds are the mean cutoffs of expert choice's `observation` of other text.

        Raises ValueError where there are no thresholds.
        """
        raise ValueError(
            f"{self.label} has no cutoffs to calibrate; name a run whose rule has thresholds, such as expert_threshold "
            "or expert_choice"
        )

    def begin_run(self, state: Any, experts_per_token: float) -> Any:
        """Return the state in which a new run takes over that of another, whose rule aimed at `experts_per_token`: what
        was learned is kept, steps are not counted.
        """
        return state

    def describe(self, state: Any) -> dict[str, Tensor]:
        """Return what metrics and figures show of the state, by name: cutoffs, biases, λ, p."""
        return {}

    def measure(self, state: Any, observation: Observation) -> dict[str, Tensor]:
        """Return what metrics and figures show of one optimizer step beyond its loads, by name, each () or (experts,).

        state: by which the step was routed.
        """
        return {}

    def progress(self, state: Any) -> str:
        """Return what a reader is told of where the state stands when a run begins, or nothing."""
        return ""

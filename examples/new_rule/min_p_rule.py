"""Min-p routing: a token goes to every expert that is not much less likely than its likeliest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from expert_threshold.routing import Bounds, Observation, Routing, Rule, Scope, Share, Window, observe, option


class MinPState(NamedTuple):
    """Log p: what moves is multiplied, so that p stays above 0."""

    log_p: Tensor  # () float32


@dataclass(frozen=True)
class MinP(Rule):
    """Every expert with at least p times the token's largest softmax share; p follows the mean fanout.

    With s = softmax(r) over a token's scores r, as min-p sampling does with a vocabulary (arXiv:2407.01082):

        z[t,i] = 1{s[t,i] ≥ p · max_j s[t,j]} = 1{r[t,i] − max_j r[t,j] ≥ log p},   g[t,i] = s[t,i]

    and once per optimizer step log p ← min(log p + u · log(mean fanout / experts_per_token), 0). Every token goes to
    one expert at least. Nothing balances the load.
    """

    num_experts: int = option(16, "Routed experts in a layer.")
    experts_per_token: float = option(2.0, "Mean number of routed experts of a token that p is steered towards.")
    p_start: Share = option(0.5, "First value of p, the share of the token's largest that an expert needs.")
    p_rate: Annotated[float, Bounds(least=0, most=1)] = option(
        0.1, "Step u of log p, as a share of the error of the log of the mean fanout."
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # checks every option against its type
        if self.experts_per_token < 1:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} must be at least 1 in min-p, since a token's likeliest "
                "expert is always taken"
            )

    def init(self) -> MinPState:
        return MinPState(torch.tensor(math.log(self.p_start), dtype=torch.float32))

    def route(
        self, scores: Tensor, state: MinPState, *, training: bool, group: dist.ProcessGroup | None = None
    ) -> Routing:
        gates = scores.softmax(-1)
        assignment = (scores - scores.amax(-1, keepdim=True)).detach() >= state.log_p
        tokens = scores[..., 0].numel()
        observation = observe(scores, assignment, gates, target=tokens * self.experts_per_token / self.num_experts)
        return Routing(scores=scores, gates=gates, assignment=assignment, observation=observation)

    @torch.no_grad()
    def update(self, state: MinPState, observation: Observation) -> MinPState:
        moved = state.log_p + self.p_rate * (observation.fanout_mean / self.experts_per_token).log()
        return MinPState(moved.clamp(max=0).where(moved.isfinite(), state.log_p))  # not finite: a step without tokens

    @property
    def label(self) -> str:
        return "min-p"

    def scope(self, training: bool) -> Scope:
        return "token"

    def window(self, sequence: int, batch: int, step: int) -> Window:
        """Return the tokens that the mean fanout is taken over."""
        return Window(step, None)

    def describe(self, state: MinPState) -> dict[str, Tensor]:
        return {"p": state.log_p.exp()}

    @classmethod
    def scaled(cls, steps: int, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a rate at which a short run, too, reaches its fanout within a tenth of its steps."""
        return {"p_rate": min(max(cls.p_rate, 30 / steps), 0.5)}

    @classmethod
    def cases(cls) -> Mapping[str, Rule]:
        return {"defaults": cls(), "few experts": cls(6, 1.5), "p stays": cls(6, p_rate=0.0)}

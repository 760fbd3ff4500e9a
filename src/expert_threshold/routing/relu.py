"""ReLU routing (ReMoE): a token goes to every expert with a positive score; an L1 loss keeps the fanout low."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..option import Positive, option
from .observation import Observation, Routing, observe
from .rule import Rule, Scope, Window

L1_RATE = 0.2
"""Step size α of λ."""


class ReLUState(NamedTuple):
    """The logarithm of λ. Updates multiply λ, so it stays above 0."""

    log_lambda: Tensor  # () float32


@dataclass(frozen=True)
class ReLU(Rule):
    """Positive scores select the experts of a token and are their gates; an L1 loss steers the mean fanout (ReMoE).

    With E experts, T tokens in a micro-batch and a target of K experts (arXiv:2412.14711; thu-ml/ReMoE, ReLURouter):

        g[t,i] = ReLU(r[t,i]),   z[t,i] = 1{g[t,i] > 0},   loss = λ Σ_i f_i Σ_t g[t,i] / T

    where f_i = E / (K T) Σ_t z[t,i] balances the loads. Once per optimizer step
    λ ← λ · (1 + α)^sign(target sparsity − sparsity), that is (1 + α)^sign(mean fanout − K), with the published α = 0.2.
    This differs from the published rule in two ways: each layer has its own λ, driven by the layer's own fanout, and λ
    does not change when the fanout is exactly on target.
    """

    experts_per_token: float = option(1.0, "Target for the mean number of routed experts per token.")
    l1_start: Positive = option(1e-8, "Initial value of λ, the strength of the L1 loss.")

    def init(self) -> ReLUState:
        return ReLUState(torch.tensor(math.log(self.l1_start), dtype=torch.float32))

    def route(
        self, scores: Tensor, state: ReLUState, *, training: bool, group: dist.ProcessGroup | None = None
    ) -> Routing:
        """Route float32 scores of shape (batch, time, experts)."""
        tokens = scores[..., 0].numel()
        target = tokens * self.experts_per_token / self.num_experts
        gates, assignment = scores.relu(), scores > 0
        observation = observe(scores, assignment, gates, target=target)
        loss = None
        if training:
            mean_gate = gates.flatten(0, -2).sum(0) / max(tokens, 1)
            weight = observation.load / max(target, 1e-30)
            loss = state.log_lambda.exp() * (weight * mean_gate).sum()
        return Routing(scores=scores, gates=gates, assignment=assignment, observation=observation, loss=loss)

    @torch.no_grad()
    def update(self, state: ReLUState, observation: Observation) -> ReLUState:
        excess = observation.load.sum() - self.experts_per_token * observation.tokens  # 0 without tokens
        return ReLUState(state.log_lambda + math.log1p(L1_RATE) * excess.sign())

    @property
    def label(self) -> str:
        return "ReMoE"

    def scope(self, training: bool) -> Scope:
        return "token"

    def pool_scope(self) -> Scope:
        return "batch"

    def window(self, sequence: int, batch: int, step: int) -> Window:
        return Window(batch, None)

    def thresholds(self, state: ReLUState) -> Tensor:
        return state.log_lambda.new_zeros(self.num_experts)

    def describe(self, state: ReLUState) -> dict[str, Tensor]:
        return {"lambda": state.log_lambda.exp()}

    @classmethod
    def scaled(cls, steps: int, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an initial λ that can grow to 0.001 within a tenth of a run, but no less than the published value."""
        return {"l1_start": max(cls.l1_start, float(f"{0.001 * (1 + L1_RATE) ** (-steps / 10):.3g}"))}

    @classmethod
    def cases(cls) -> Mapping[str, Rule]:
        return {"balanced": cls(6), "a fraction": cls(6, 1.5), "strong": cls(6, 0.5, l1_start=0.1)}

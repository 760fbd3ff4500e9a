"""Top-p routing (Dynamic MoE): a token goes to its likeliest experts until their shares come to p."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .observation import Observation, Routing, observe
from .options import check_experts, is_number, require
from .rule import Rule, Scope, Window


class TopPState(NamedTuple):
    """What the controller knows; stays as it is where there is none."""

    p: Tensor  # () float32
    error: Tensor  # () float32, that of the step before


@dataclass(frozen=True)
class TopP(Rule):
    """The smallest set of a token's experts whose softmax shares come to p; p is fixed or follows the mean fanout.

    With s = softmax(r) over a token's E scores r, largest first, ties to the lower expert (arXiv:2403.07652;
    ZhenweiAn/Dynamic_MoE, whose code differs only where a sum is p exactly):

        z[t,i] = 1{Σ_{j before i} s[t,j] < p},   g[t,i] = s[t,i]

    Every token goes to one expert at least. With a controller, a proportional-integral one as in DTop-p
    (arXiv:2512.13996), once per optimizer step with e = (experts_per_token − mean fanout) / E

        p ← clamp(p + u_P (e − e of the step before) + u_I e, 1/E, 1)

    for each layer by itself. Neither paper's losses and normalisations of scores are part of it; nothing balances load.
    """

    # Routed experts in a layer.
    num_experts: int = 16
    # Mean number of routed experts of a token that the controller steers p towards; without one p alone decides.
    experts_per_token: float = 1.0
    # Share of a token's softmax that its experts have together; with a controller the first one.
    p: float = 0.4
    # Let p follow the mean fanout.
    controller: bool = False
    # Gain u_P of the controller: p moves by so much of what the error changes by.
    p_gain: float = 0.1
    # Gain u_I of the controller: p moves by so much of the error.
    p_rate: float = 0.02

    def __post_init__(self) -> None:
        check_experts(self.num_experts, self.experts_per_token)
        require(is_number(self.p, at_least=0) and 0 < self.p <= 1, "p", self.p, "must lie in (0, 1]: a share")
        require(isinstance(self.controller, bool), "controller", self.controller, "must be True or False")
        for name, value in (("p_gain", self.p_gain), ("p_rate", self.p_rate)):
            require(is_number(value, at_least=0), name, value, "must be a number of at least 0")
        require(
            self.experts_per_token >= 1 or not self.controller,
            "experts_per_token",
            self.experts_per_token,
            "must be at least 1 where a controller aims at it, since a token's likeliest expert is always taken",
        )

    def init(self) -> TopPState:
        return TopPState(torch.tensor(self.p, dtype=torch.float32), torch.tensor(0.0, dtype=torch.float32))

    def route(
        self, scores: Tensor, state: TopPState, *, training: bool, group: dist.ProcessGroup | None = None
    ) -> Routing:
        """scores: (batch, time, experts) float32."""
        gates = scores.softmax(-1)
        shares, order = gates.detach().sort(dim=-1, descending=True, stable=True)
        before = F.pad(shares.cumsum(-1)[..., :-1], (1, 0))
        p = state.p if self.controller else self.p  # a state of another run may have another p
        assignment = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, before < p)
        target = scores[..., 0].numel() * self.experts_per_token / self.num_experts if self.controller else None
        observation = observe(scores, assignment, gates, target=target)
        return Routing(scores=scores, gates=gates, assignment=assignment, observation=observation)

    @torch.no_grad()
    def update(self, state: TopPState, observation: Observation) -> TopPState:
        if not self.controller:
            return state
        error = (self.experts_per_token - observation.fanout_mean) / self.num_experts
        moved = state.p + self.p_gain * (error - state.error) + self.p_rate * error
        some = observation.tokens > 0
        # Below 1/E every token has one expert: to go on moving there would take as long to come back.
        return TopPState(moved.clamp(1 / self.num_experts, 1).where(some, state.p), error.where(some, state.error))

    @property
    def label(self) -> str:
        return "top-p steered" if self.controller else f"top-p {self.p:g}"

    def scope(self, training: bool) -> Scope:
        return "token"

    def window(self, sequence: int, batch: int, step: int) -> Window:
        """Return the tokens that the mean fanout is taken over."""
        return Window(step if self.controller else None, None)

    def describe(self, state: TopPState) -> dict[str, Tensor]:
        return {"p": state.p if self.controller else torch.full_like(state.p, self.p)}

    @classmethod
    def scaled(cls, steps: int, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a gain at which a short run, too, reaches its fanout early."""
        return {"p_rate": min(max(cls.p_rate, 10 / max(steps, 1)), 0.2)}

    @classmethod
    def cases(cls) -> Mapping[str, Rule]:
        steered = {f"steered to {fanout}": cls(6, fanout, controller=True) for fanout in (1, 2.5, 6)}
        return {"fixed": cls(6), "everything": cls(6, 6, p=1.0), **steered}

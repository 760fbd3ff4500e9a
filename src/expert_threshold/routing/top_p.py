"""Top-p routing (Dynamic MoE): a token goes to its likeliest experts until their shares add up to p."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..option import NonNegative, Share, option
from .observation import Observation, Routing, observe
from .rule import Rule, Scope, Window


class TopPState(NamedTuple):
    """The state of the controller that steers p. It never changes if p is fixed."""

    p: Tensor  # () float32
    error: Tensor  # () float32, the previous step's error


P_START = 0.4
"""The default p, and the initial value of a steered p."""
P_GAIN = 0.1
"""Proportional gain u_P of the controller, applied to the change in the error."""


@dataclass(frozen=True)
class TopP(Rule):
    """A token goes to the fewest experts whose softmax shares add up to p; p is fixed or adjusted to a mean fanout.

    With s = softmax(r) over a token's E scores r, largest first, ties to the lower expert (arXiv:2403.07652;
    ZhenweiAn/Dynamic_MoE, whose code differs only where a sum is p exactly):

        z[t,i] = 1{Σ_{j before i} s[t,j] < p},   g[t,i] = s[t,i]

    Every token goes to at least one expert. The optional proportional-integral controller of DTop-p (arXiv:2512.13996)
    updates each layer's p once per optimizer step, with e = (experts_per_token − mean fanout) / E:

        p ← clamp(p + u_P (e − previous e) + u_I e, 1/E, 1)

    The losses and score normalisations of both papers are omitted, so nothing balances the load.
    """

    experts_per_token: float = option(1.0, "Target for the mean routed experts per token, only used if p is steered.")
    p: Literal["steered"] | Share = option(
        P_START,
        "Probability that a token's experts add up to. steered adjusts p until the mean fanout is experts_per_token.",
    )
    p_rate: NonNegative = option(0.02, "Integral gain u_I of the controller that steers p.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.p == "steered" and self.experts_per_token < 1:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} must be at least 1 with p='steered', since a token's "
                "likeliest expert is always taken"
            )

    def init(self) -> TopPState:
        p = P_START if self.p == "steered" else self.p
        return TopPState(torch.tensor(p, dtype=torch.float32), torch.tensor(0.0, dtype=torch.float32))

    def route(
        self, scores: Tensor, state: TopPState, *, training: bool, group: dist.ProcessGroup | None = None
    ) -> Routing:
        """Route float32 scores of shape (batch, time, experts)."""
        gates = scores.softmax(-1)
        shares, order = gates.detach().sort(dim=-1, descending=True, stable=True)
        before = F.pad(shares.cumsum(-1)[..., :-1], (1, 0))
        p = state.p if self.p == "steered" else self.p  # the state may come from a run with another p
        assignment = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, before < p)
        target = scores[..., 0].numel() * self.experts_per_token / self.num_experts if self.aims_at_fanout else None
        observation = observe(scores, assignment, gates, target=target)
        return Routing(scores=scores, gates=gates, assignment=assignment, observation=observation)

    @torch.no_grad()
    def update(self, state: TopPState, observation: Observation) -> TopPState:
        if self.p != "steered":
            return state
        error = (self.experts_per_token - observation.fanout_mean) / self.num_experts
        moved = state.p + P_GAIN * (error - state.error) + self.p_rate * error
        some = observation.tokens > 0
        # Below 1/E every token has one expert; clamping keeps the integral from winding up.
        return TopPState(moved.clamp(1 / self.num_experts, 1).where(some, state.p), error.where(some, state.error))

    @property
    def label(self) -> str:
        return "top-p steered" if self.p == "steered" else f"top-p {self.p:g}"

    def scope(self, training: bool) -> Scope:
        return "token"

    @property
    def aims_at_fanout(self) -> bool:
        return self.p == "steered"

    def window(self, sequence: int, batch: int, step: int) -> Window:
        return Window(step if self.aims_at_fanout else None, None)

    def describe(self, state: TopPState) -> dict[str, Tensor]:
        return {"p": state.p if self.p == "steered" else torch.full_like(state.p, self.p)}

    @classmethod
    def scaled(cls, steps: int, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an integral gain with which even a short run reaches its target fanout early."""
        return {"p_rate": min(max(cls.p_rate, 10 / max(steps, 1)), 0.2)}

    @classmethod
    def cases(cls) -> Mapping[str, Rule]:
        steered = {f"steered to {fanout}": cls(6, fanout, p="steered") for fanout in (1, 2.5, 6)}
        return {"fixed": cls(6), "everything": cls(6, 6, p=1.0), **steered}

"""Null slots: tokens choose among experts and slots that compute nothing (AdaMoE; MoE++; LongCat-Flash)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..option import Count, NonNegative, Positive, option
from .observation import Observation, Routing, observe
from .rule import Rule, Scope, Window
from .selection import kth_largest, take

Null = Literal["zero", "copy"]


class NullSlotState(NamedTuple):
    """Biases that are added to the shares of the slots for selection only."""

    bias: Tensor  # (num_scores,) float32, experts first


@dataclass(frozen=True)
class NullSlots(Rule):
    """Every token chooses slots_per_token slots, experts or null slots; its fanout is the number of experts among them.

    p = softmax(r) over all slots, z_t = Top(p_t + b), and gates are c · p. Each step adds u · sign(target load − load)
    to a slot's bias, which balances the experts and holds the mean fanout at experts_per_token without a loss.
    """

    experts_per_token: float = option(1, "Target for the mean number of routed experts per token.")
    null_slots: Count = option(16, "Number of slots that compute nothing.")
    slots_per_token: Count = option(2, "Number of slots, experts or null slots, that every token chooses.")
    null: Null = option("zero", "Output of a null slot. copy outputs the token itself times the gate.")
    bias_rate: NonNegative = option(0.001, "Step size u of the biases. 0 disables them.")
    gate_scale: Positive = option(1.0, "Factor c applied to all gates.")

    def __post_init__(self) -> None:
        super().__post_init__()
        slots, most = self.slots_per_token, self.num_experts + self.null_slots
        if slots > most:
            raise ValueError(f"slots_per_token={slots} must be at most {most}, the number of slots")
        least = max(slots - self.null_slots, 0)
        if not least <= self.experts_per_token <= slots:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} must be between {least} and slots_per_token={slots}; "
                "no choice of slots gives any other mean"
            )

    @property
    def num_scores(self) -> int:
        return self.num_experts + self.null_slots

    def init(self) -> NullSlotState:
        return NullSlotState(torch.zeros(self.num_scores, dtype=torch.float32))

    def route(
        self, scores: Tensor, state: NullSlotState, *, training: bool, group: dist.ProcessGroup | None = None
    ) -> Routing:
        """Route float32 scores of shape (batch, time, num_scores), experts first. Ties go to the lower slot."""
        tokens, experts = scores[..., 0].numel(), self.num_experts
        shares = scores.softmax(-1)
        biased = (shares.detach() + state.bias).reshape(tokens, self.num_scores, 1)
        (lowest,) = kth_largest(biased, [self.slots_per_token])
        chosen = take(biased, lowest).reshape(scores.shape)
        assignment, null = chosen[..., :experts], chosen[..., experts:]
        factors = self.gate_scale * shares
        gates = factors[..., :experts].contiguous()  # FSDP2 warns about outputs that are views
        copied = (factors[..., experts:] * null).sum(-1) if self.null == "copy" else None
        target, null_load = tokens * self.experts_per_token / experts, null.flatten(0, 1).sum(0)
        seen = observe(scores, assignment, gates, target=target, null_load=null_load)
        return Routing(scores=scores, gates=gates, assignment=assignment, observation=seen, passthrough=copied)

    @torch.no_grad()
    def update(self, state: NullSlotState, observation: Observation) -> NullSlotState:
        expert = self.experts_per_token / self.num_experts  # target shares of the tokens
        null = (self.slots_per_token - self.experts_per_token) / self.null_slots
        tokens = observation.tokens
        error = torch.cat([expert * tokens - observation.load, null * tokens - observation.null_load])
        return NullSlotState(state.bias + self.bias_rate * error.sign().float())

    @property
    def label(self) -> str:
        return f"TC null {self.null}"

    def scope(self, training: bool) -> Scope:
        return "token"

    def max_pairs(self, tokens: int, *, training: bool, ranks: int = 1) -> int:
        return tokens * min(self.slots_per_token, self.num_experts)

    def window(self, sequence: int, batch: int, step: int) -> Window:
        return Window(step, None)

    def describe(self, state: NullSlotState) -> dict[str, Tensor]:
        return {"bias": state.bias[: self.num_experts], "null_bias": state.bias[self.num_experts :].mean()}

    def measure(self, state: NullSlotState, observation: Observation) -> dict[str, Tensor]:
        """Return the share of chosen slots that are null."""
        return {"null_share": observation.null_load.sum() / (observation.tokens * self.slots_per_token).clamp(min=1)}

    @classmethod
    def cases(cls) -> Mapping[str, Rule]:
        return {
            "zero": cls(6, 1, null_slots=6),
            "copy": cls(6, 1.5, null_slots=2, slots_per_token=3, null="copy"),
            "all of them": cls(6, 6, null_slots=1, slots_per_token=7),
        }

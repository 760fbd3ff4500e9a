"""Gates, the factors applied to experts' outputs, and the base classes of rules that offer a choice of gates."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from .rule import Rule

Gate = Literal["sigmoid", "softmax", "softmax_chosen", "sigmoid_normalised"]
Over = Literal["scores", "gates"]
PlainGate = Literal["sigmoid", "softmax"]
"""Gates that do not depend on which experts are chosen, so that a token may go to no expert."""
_LABELS: dict[Gate, str] = {
    "sigmoid": "",
    "softmax": " softmax",
    "softmax_chosen": " softmax chosen",
    "sigmoid_normalised": " sigmoid norm.",
}
NULL_SCORES = "Router scores without an expert. They only enter the softmax of the gates."
"""Help text of the option null_scores, shared by several rules."""


class Gated(Rule):
    """Base class of rules with the options gate and null_scores, and optionally gate_scale.

    Null scores come after the experts' scores. No token is routed to them, but the softmax of the gates includes them,
    so they lower the gates of tokens that no expert suits.
    """

    gate: Gate
    gate_scale: float = 1  # fixed for rules without this option
    null_scores: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.null_scores and self.gate != "softmax":
            raise ValueError(
                f"null_scores={self.null_scores} requires gate='softmax', the only gate over all scores; use that "
                "gate, or leave null_scores at 0"
            )

    @property
    def num_scores(self) -> int:
        return self.num_experts + self.null_scores

    @property
    def sigmoid_gates(self) -> bool:
        return self.gate == "sigmoid" and self.gate_scale == 1

    @property
    def softmax_gates(self) -> bool:
        return self.gate == "softmax" and self.gate_scale == 1

    def without_nulls(self, values: Tensor) -> Tensor:
        """Return the columns of values (batch, time, num_scores) that belong to experts."""
        width = self.num_experts + self.null_scores
        assert values.shape[-1] == width, f"{values.shape[-1]} scores per token, not {width}"
        return values[..., : self.num_experts] if self.null_scores else values

    def gates_of(self, scores: Tensor, assignment: Tensor | None = None) -> Tensor:
        """Return the gates (batch, time, experts) for scores r (batch, time, num_scores). Normalised gates also need
        the assignment z.

        sigmoid: σ(r). softmax: exp(r) / Σ exp(r) over all scores, as in Switch and OLMoE. softmax_chosen: softmax over
        the chosen experts, as in Mixtral and, with norm_topk_prob, in Qwen3-MoE. sigmoid_normalised: σ(r) / Σ z σ(r),
        as in DeepSeek-V3, where gate_scale is called routed_scaling_factor. Gates of experts that are not chosen are
        unspecified but finite.
        """
        if self.gate in ("sigmoid", "softmax"):
            # Without the null scores, this would be a view, and FSDP2 warns about outputs that are views.
            gates = self.without_nulls(weights_of(self.gate, scores)).contiguous()
        else:
            assert assignment is not None, f"gate={self.gate!r} is normalised over the assignment"
            left_out = ~assignment & assignment.any(-1, keepdim=True)  # a token without experts needs a finite sum, too
            gates = _log_weights(self.gate, scores).masked_fill(left_out, float("-inf")).softmax(-1)
        return gates if self.gate_scale == 1 else self.gate_scale * gates

    def label_of_gates(self) -> str:
        """Return the part of a rule's label that names its gates, which is empty for plain sigmoids."""
        scale = "" if self.gate_scale == 1 else f" ×{self.gate_scale:g}"
        plural = "" if self.null_scores == 1 else "s"
        nulls = f", {self.null_scores} null score{plural}" if self.null_scores else ""
        return _LABELS[self.gate] + scale + nulls


class Valued(Gated):
    """Base class of gated rules that select by the scores or, with over="gates", by their sigmoid or softmax."""

    over: Over

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts_per_token == 1 and self.gate in ("softmax_chosen", "sigmoid_normalised"):
            raise ValueError(
                f"gate={self.gate!r} is constant with one expert per token, so the router would not learn; use "
                "experts_per_token=2 or more, or gate='sigmoid' or 'softmax'"
            )

    def values_of(self, scores: Tensor) -> Tensor:
        """Return the experts' values (batch, time, experts) for scores (batch, time, num_scores), without gradients."""
        detached = scores.detach()
        return self.without_nulls(detached if self.over == "scores" else weights_of(self.gate, detached))

    def can_start_from(self, other: Rule) -> bool:
        """Return True if both rules keep the same kind of state in the same units."""
        return super().can_start_from(other) and isinstance(other, Valued) and self._values == other._values

    @property
    def _values(self) -> tuple[object, ...]:
        """Return the units of `values_of`: scores, or the gate's activation and the number of null scores."""
        return ("scores",) if self.over == "scores" else (self.gate.partition("_")[0], self.null_scores)


def weights_of(gate: Gate, scores: Tensor) -> Tensor:
    """Return the gates before selection, scaling and normalisation over chosen experts: σ(r) or softmax(r)."""
    return scores.sigmoid() if gate.startswith("sigmoid") else scores.softmax(-1)


def shares_of(gate: Gate, scores: Tensor) -> Tensor:
    """Return the experts' shares for scores r. Their means over tokens are the P_i of the auxiliary losses.

    A share is σ(r) or, normalised over all experts, softmax(r) or σ(r) / Σ σ(r).
    """
    return scores.sigmoid() if gate == "sigmoid" else _log_weights(gate, scores).softmax(-1)


def _log_weights(gate: Gate, scores: Tensor) -> Tensor:
    """Return the logarithms of the weights to normalise, so that tiny weights do not underflow."""
    return F.logsigmoid(scores) if gate == "sigmoid_normalised" else scores

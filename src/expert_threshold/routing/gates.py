"""Gates of published models: the factors of experts' outputs."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Gate = Literal["sigmoid", "softmax", "softmax_chosen", "sigmoid_normalised"]
PlainGate = Literal["sigmoid", "softmax"]
"""Gates that do not depend on the chosen experts, so that a token may have none."""
_LABELS: dict[Gate, str] = {
    "sigmoid": "",
    "softmax": " softmax",
    "softmax_chosen": " softmax chosen",
    "sigmoid_normalised": " sigmoid norm.",
}


def label_of_gates(gate: Gate, scale: float = 1) -> str:
    """Return the part of a rule's label that names its gates; empty for plain sigmoids."""
    return _LABELS[gate] + ("" if scale == 1 else f" ×{scale:g}")


def gates_of(gate: Gate, scores: Tensor, assignment: Tensor, scale: float) -> Tensor:
    """Return the gates (batch, time, experts) for scores r and assignment z, times `scale`.

    sigmoid: σ(r). softmax: exp(r) / Σ exp(r) over all experts, as in Switch and OLMoE. softmax_chosen: the same over
    the chosen ones, as in Mixtral, and in Qwen3-MoE with norm_topk_prob. sigmoid_normalised: σ(r) / Σ z σ(r), as in
    DeepSeek-V3, whose routed_scaling_factor is `scale`. The gates of experts that are not chosen are unspecified.
    """
    if gate == "sigmoid":
        gates = scores.sigmoid()
    elif gate == "softmax":
        gates = scores.softmax(-1)
    else:
        gates = _log_weights(gate, scores).masked_fill(~assignment, float("-inf")).softmax(-1)
    return gates if scale == 1 else scale * gates


def weights_of(gate: Gate, scores: Tensor) -> Tensor:
    """Return the unscaled gates before selection and before normalisation over the chosen: σ(r) or softmax(r)."""
    return scores.sigmoid() if gate.startswith("sigmoid") else scores.softmax(-1)


def shares_of(gate: Gate, scores: Tensor) -> Tensor:
    """Return the unscaled gates before selection, whose mean is P_i in the auxiliary losses: σ(r), or normalised over
    all experts, softmax(r) or σ(r) / Σ σ(r).
    """
    return scores.sigmoid() if gate == "sigmoid" else _log_weights(gate, scores).softmax(-1)


def _log_weights(gate: Gate, scores: Tensor) -> Tensor:
    """Return the logarithms of the weights to normalise, so that tiny weights do not underflow."""
    return F.logsigmoid(scores) if gate == "sigmoid_normalised" else scores

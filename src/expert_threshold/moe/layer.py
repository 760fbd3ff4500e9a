"""The Mixture-of-Experts layer, y_t = shared(x_t) + Σ_i z[t,i] · g[t,i] · expert_i(x_t), with gates g from the rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..kernels import as_autocast, no_autocast
from ..kernels.activation import ActivationName
from ..option import Count, NonNegative, NonNegativeInt, require_kind
from ..routing import Observation, Routing, Rule
from .backends import BACKENDS, DispatchName
from .experts import Experts, FeedForward
from .router import Router, RoutingHistory

GateNorm = Literal["fanout"]


def require_rule(rule: object) -> None:
    """Raise ValueError unless `rule` is a routing rule."""
    if not isinstance(rule, Rule):
        raise ValueError(
            f"rule={rule!r} is not a rule; use an instance of a subclass of Rule, such as ExpertThreshold()"
        )


class MoE(nn.Module):
    """A router with a routing rule, its routed experts, and shared experts that process every token.

    d_expert: hidden width of each expert. dispatch: the name of a backend, or 'auto'. gate_norm: None, or 'fanout' to
    divide the routed sum by max(fanout, 1). z_loss: strength of the router z-loss; None disables it.
    Raises ValueError if an option is unknown or out of range.
    """

    def __init__(
        self,
        d_model: int,
        d_expert: int,
        rule: Rule,
        shared_experts: int = 1,
        dispatch: str = "auto",
        *,
        activation: ActivationName = "relu2",
        gate_norm: GateNorm | None = None,
        z_loss: float | None = None,
    ) -> None:
        super().__init__()
        require_rule(rule)
        require_kind("d_model", d_model, Count)
        require_kind("d_expert", d_expert, Count)
        require_kind("shared_experts", shared_experts, NonNegativeInt)
        require_kind("dispatch", dispatch, DispatchName)
        require_kind("activation", activation, ActivationName)
        require_kind("gate_norm", gate_norm, GateNorm | None)
        require_kind("z_loss", z_loss, NonNegative | None)
        self.dispatch = BACKENDS[dispatch]
        self.gate_norm = gate_norm
        self.router = Router(d_model, rule, z_loss)
        self.experts = Experts(rule.num_experts, d_model, d_expert, activation)
        self.shared = FeedForward(d_model, shared_experts * d_expert, activation) if shared_experts else None

    def forward(
        self,
        x: Tensor,
        pasts: Sequence[RoutingHistory] | None = None,
        *,
        mask: Tensor | None = None,
        record: bool = False,
    ) -> tuple[Tensor, Observation | Routing]:
        """Return y, which has the shape (batch, time, d_model) and the dtype of x, and the observation.

        pasts: at inference, the past of each sequence that x continues. mask: (batch, time) bool, False for tokens such
        as padding, whose outputs are zero and which affect no selection, load, cutoff or loss. record: return the whole
        routing instead of the observation. Raises ValueError if x or mask has the wrong shape.
        """
        d_model = self.router.weight.shape[1]
        if x.ndim != 3 or x.shape[2] != d_model:
            raise ValueError(f"x must have shape (batch, time, d_model={d_model}), not {tuple(x.shape)}")
        fits = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == x.shape[:2] and pasts is None
        if mask is not None and not fits:
            raise ValueError(f"mask must be bool of shape {tuple(x.shape[:2])}, (batch, time), and pasts must be None")
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0)  # outputs are zero, and NaN in padding reaches no gradient
        routing = self.router(x, pasts, mask)
        y = self.compute(x, routing)
        return y, routing if record else routing.observation

    def compute(self, x: Tensor, routing: Routing) -> Tensor:
        """Return y for x (batch, time, d_model) and a given routing, in autocast's dtype under autocast."""
        experts = self.router.rule.num_experts  # null slots and null scores come after them
        assignment = routing.assignment[..., :experts].flatten(0, 1)
        factors = routing.gates[..., :experts].flatten(0, 1)
        if self.gate_norm == "fanout":
            factors = factors / assignment.sum(-1, keepdim=True).clamp(min=1)
        x = as_autocast(x)
        flat = x.flatten(0, 1)
        with no_autocast(x):
            ranks = 1 if self.router.group is None else dist.get_world_size(self.router.group)
            rows = self.router.rule.max_pairs(len(flat), training=self.training, ranks=ranks)
            y: Tensor = self.dispatch(flat, factors, assignment, self.experts, self.shared, rows=rows)
            y = torch.ops.aten._unsafe_view(y, x.shape)  # a view could not be modified in place under FSDP2
            return y if routing.passthrough is None else y + routing.passthrough[..., None].to(x.dtype) * x

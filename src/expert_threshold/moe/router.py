"""Scores, the rule that turns them into an assignment, and the rule's state as buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.autograd import refuse_second_derivative
from ..routing import Observation, Routing, Rule, all_finite, observe


class _Scores(torch.autograd.Function):
    """W x in float32 for x of any dtype; keeps x as it is, and multiplies its gradient in its dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float())

    @staticmethod
    def backward(ctx: Any, dscores: Tensor) -> tuple[Tensor, Tensor]:
        refuse_second_derivative()
        x, weight = ctx.saved_tensors
        dweight = dscores.flatten(0, -2).T @ x.flatten(0, -2).float()
        return dscores.to(x.dtype) @ weight.to(x.dtype), dweight.to(weight.dtype)


class Router(nn.Module):
    """r = W_r x (paper, Eq. 1), float32 whatever x is, and the rule's answer.

    The rule's state lives in buffers named `state_<field>`: saved with the model, float32 under any cast, initialised
    even when the module was built on the meta device. group: the ranks over which a global pool is formed. rate: routed
    experts per token that inference aims at instead of what was trained, see `state_at`; None is as trained.
    """

    def __init__(self, d_model: int, rule: Rule, z_loss: float | None = None) -> None:
        super().__init__()
        self.rule = rule
        self.z_loss = z_loss
        self.group: dist.ProcessGroup | None = None
        self.rate: float | None = None
        self.weight = nn.Parameter(torch.empty(rule.num_scores, d_model))
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=d_model**-0.5)
        self._state_type = type(rule.init())
        for name, value in rule.init()._asdict().items():
            self.register_buffer(f"state_{name}", value.to(self.weight.device))

    def forward(self, x: Tensor, earlier: Tensor | None = None) -> Routing:
        """x: (batch, time, d_model). Changes nothing: the state moves in `update` alone.

        earlier: in inference, the scores of the tokens that x continues, (batch, past, num_scores).
        """
        with torch.autocast(x.device.type, enabled=False):  # it would round the scores
            scores: Tensor = _Scores.apply(x, self.weight)
        if not self.training:
            return route_behind(self.rule, scores, self.state_at(self.rate), earlier)
        routing = self.rule.route(scores, self.state, training=True, group=self.group)
        if self.z_loss is not None:
            tokens = scores[..., 0].numel()
            z_loss = self.z_loss * scores.logsumexp(-1).square().sum() / max(tokens, 1)
            loss = z_loss if routing.loss is None else routing.loss + z_loss
            routing = Routing(**{**routing._asdict(), "loss": loss})  # torch 2.11 cannot trace a record's _replace
        return routing

    @property
    def state(self) -> Any:
        """The rule's state, a NamedTuple that shares memory with the buffers."""
        return self._state_type(*(getattr(self, f"state_{name}") for name in self._state_type._fields))

    def state_at(self, rate: float | None) -> Any:
        """Return the state with which inference has `rate` routed experts per token on average; as trained for None.

        Raises ValueError if the rate lies outside 0 and num_experts, or the rule cannot aim at it.
        """
        return self.state if rate is None else self.rule.at_rate(self.state, rate)

    def thresholds(self, rate: float | None = None) -> Tensor | None:
        """Return what inference compares scores with, (experts,), at a rate or at the router's; None where the rule
        does anything else. Raises ValueError as `state_at` does.
        """
        return self.rule.thresholds(self.state_at(self.rate if rate is None else rate))

    @torch.no_grad()
    def update(self, observation: Observation) -> None:
        """Move the rule's state, in place; once per optimizer step.

        An observation that is not finite changes nothing: a cutoff of NaN would stay one. No word of it here, which
        would wait for the device; `scores_not_finite` tells.
        """
        finite = all_finite(observation.tensors().values())
        moved = self.rule.update(self.state, observation)
        self._assign(new.where(finite, old) for old, new in zip(self.state, moved, strict=True))

    @torch.no_grad()
    def calibrate(self, observation: Observation) -> None:
        """Take thresholds from expert choice's observation of some text, in place. Raises ValueError without any."""
        self._assign(self.rule.calibrated(self.state, observation))

    @torch.no_grad()
    def begin_run(self, experts_per_token: float) -> None:
        """Take over the state of another run, whose rule aimed at so many, in place; none of its steps is counted."""
        self._assign(self.rule.begin_run(self.state, experts_per_token))

    def reset_state(self) -> None:
        """The state before the first step, in place."""
        self._assign(self.rule.init())

    def _assign(self, state: Iterable[Tensor]) -> None:
        for old, new in zip(self.state, state, strict=True):
            old.copy_(new)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Move devices but never dtypes of the state, and give it its first values when it leaves the meta device."""
        before = self.state
        super()._apply(fn, recurse)
        for name, old, first in zip(self._state_type._fields, before, self.rule.init(), strict=True):
            device = getattr(self, f"state_{name}").device
            source = first if old.is_meta and device.type != "meta" else old
            setattr(self, f"state_{name}", source.to(device))
        return self


def route_behind(rule: Rule, scores: Tensor, state: Any, earlier: Tensor | None) -> Routing:
    """Route scores (batch, time, num_scores) in inference, behind those of earlier tokens of the same sequences.

    earlier: (batch, past, num_scores), or None where the scores are the first or the rule looks at no other token.
    """
    if earlier is None or earlier.shape[1] == 0:
        return rule.route(scores, state, training=False)
    whole = rule.route(torch.cat((earlier, scores), 1), state, training=False)
    past = earlier.shape[1]
    gates, assignment = whole.gates[:, past:], whole.assignment[:, past:]
    return Routing(
        scores=scores,
        gates=gates,
        assignment=assignment,
        observation=observe(scores, assignment, gates),
        passthrough=None if whole.passthrough is None else whole.passthrough[:, past:],
    )

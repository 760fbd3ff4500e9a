"""Scores, the rule that turns them into an assignment, and the rule's state as buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..autograd import refuse_second_derivative
from ..routing import (
    CutoffState,
    Observation,
    Routing,
    Rule,
    TokenChoice,
    all_finite,
    begin_run,
    cutoff,
    dial,
    rule_name,
)


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
    experts per token that inference aims at instead of what was trained, in `dialled`'s words; None is as trained.
    """

    def __init__(self, d_model: int, rule: Rule, z_loss: float | None = None) -> None:
        super().__init__()
        self.rule = rule
        self.z_loss = z_loss
        self.group: dist.ProcessGroup | None = None
        self.rate: float | None = None
        self.weight = nn.Parameter(torch.empty(rule.num_experts, d_model))
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=d_model**-0.5)
        self._state_type = type(rule.init())
        for name, value in rule.init()._asdict().items():
            self.register_buffer(f"state_{name}", value.to(self.weight.device))

    def forward(self, x: Tensor) -> Routing:
        """x: (batch, time, d_model). Changes nothing: the state moves in `update` alone."""
        with torch.autocast(x.device.type, enabled=False):  # it would round the scores
            scores: Tensor = _Scores.apply(x, self.weight)
        state = self.state if self.training else self.dialled(self.rate)
        routing = self.rule.route(scores, state, training=self.training, group=self.group)
        if self.z_loss is not None and self.training:
            tokens = scores[..., 0].numel()
            z_loss = self.z_loss * scores.logsumexp(-1).square().sum() / max(tokens, 1)
            routing = Routing(*routing[:-1], loss=z_loss if routing.loss is None else routing.loss + z_loss)
        return routing

    @property
    def state(self) -> Any:
        """The rule's state, a NamedTuple that shares memory with the buffers."""
        return self._state_type(*(getattr(self, f"state_{name}") for name in self._state_type._fields))

    def dialled(self, rate: float | None) -> Any:
        """The state with which inference has `rate` routed experts per token on average; as trained for None.

        Raises ValueError if the rate lies outside 0 and num_experts, or the rule's state cannot tell its cutoffs.
        """
        if rate is None:
            return self.state
        if not isinstance(self.state, CutoffState):
            raise ValueError(
                f"rate={rate} needs cutoffs, which {rule_name(self.rule)} has not; use a model trained by "
                "expert_choice or expert_threshold"
            )
        return dial(self.state, rate)

    @property
    def cutoff(self) -> Tensor | None:
        """What inference compares scores with, (experts,); None under a rule that has no cutoffs."""
        return self.cutoff_at(self.rate)

    def cutoff_at(self, rate: float | None) -> Tensor | None:
        """The same at a rate, which is refused as by `dialled`."""
        state = self.dialled(rate)
        return cutoff(state) if isinstance(state, CutoffState) else None

    @property
    def bias(self) -> Tensor | None:
        """What is added to scores before experts are chosen, (experts,); None under a rule that moves no biases."""
        moves = isinstance(self.rule, TokenChoice) and self.rule.balance.startswith("loss_free")
        return self.state.bias if moves else None

    @torch.no_grad()
    def update(self, observation: Observation) -> None:
        """Move the rule's state, in place; once per optimizer step.

        An observation that is not finite changes nothing: a cutoff of NaN would stay one. No word of it here, which
        would wait for the device; `scores_not_finite` tells.
        """
        finite = all_finite(observation)
        for old, new in zip(self.state, self.rule.update(self.state, observation), strict=True):
            old.copy_(new.where(finite, old))

    @torch.no_grad()
    def set_cutoffs(self, observation: Observation) -> None:
        """Take the mean cutoffs and the sketch of what was seen, in place; as if seen in every step so far."""
        state = self.state
        assert isinstance(state, CutoffState)
        state.mean.copy_(observation.batch_cutoff)
        state.weight.fill_(1)
        state.slope.zero_()
        state.sketch.copy_(observation.batch_sketch)
        state.sketch_weight.fill_(1)

    @torch.no_grad()
    def begin_run(self, experts_per_token: float) -> None:
        """Begin a run of one's own with the state of another, whose rule aimed at so many: see `routing.begin_run`."""
        if isinstance(self.state, CutoffState):
            mine = self.rule.experts_per_token
            first = CutoffState(*(value.to(self.weight.device) for value in self.rule.init()))
            begun = begin_run(self.state, first, None if mine == experts_per_token else mine)
            for old, new in zip(self.state, begun, strict=True):
                old.copy_(new)

    def reset_state(self) -> None:
        """The state before the first step, in place."""
        for old, new in zip(self.state, self.rule.init(), strict=True):
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

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """A state that was saved before sketches and slopes were kept has none."""
        if f"{prefix}state_mean" in state_dict:
            first = self.rule.init()
            for name in ("sketch", "sketch_weight", "slope"):
                state_dict.setdefault(f"{prefix}state_{name}", getattr(first, name))
        super()._load_from_state_dict(state_dict, prefix, *args)

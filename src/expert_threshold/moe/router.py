"""The router: scores, the rule that turns them into an assignment, and buffers with the state of the rule."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import apply, no_autocast, refuse_second_derivative
from ..routing import Observation, Routing, Rule, all_finite, observe
from ..routing.gates import weights_of


def exact_parts(x: Tensor) -> Tensor:
    """Split float32 x into three bfloat16 parts (3, …), of 8 bits each, whose sum is exactly x."""
    first = x.bfloat16()
    second = (x - first.float()).bfloat16()
    return torch.stack((first, second, (x - first.float() - second.float()).bfloat16()))


def _on_tensor_cores(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16


class _Scores(torch.autograd.Function):
    """W x in float32, for x of any dtype. Backward uses x as given and returns its gradient in the dtype of x.

    On a GPU, tensor cores multiply bfloat16 x by the exact parts of the other factor and accumulate in float32, so x is
    read once and never cast.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        if not _on_tensor_cores(x):
            return F.linear(x.float(), weight.float())
        parts = exact_parts(weight.float()).flatten(0, 1)
        products = torch.mm(x.flatten(0, -2), parts.T, out_dtype=torch.float32)
        return products.view(*x.shape[:-1], 3, len(weight)).sum(-2)

    @staticmethod
    def backward(ctx: Any, dscores: Tensor) -> tuple[Tensor, Tensor]:
        refuse_second_derivative()
        x, weight = ctx.saved_tensors
        rows, drows = x.flatten(0, -2), dscores.flatten(0, -2)
        if _on_tensor_cores(x):
            parts = exact_parts(drows.T).flatten(0, 1)
            dweight = torch.mm(parts, rows, out_dtype=torch.float32).view(3, *weight.shape).sum(0)
        else:
            dweight = drows.T @ rows.float()
        return dscores.to(x.dtype) @ weight.to(x.dtype), dweight.to(weight.dtype)


def _joined(parts: list[Routing], join: Callable[[list[Tensor]], Tensor], loss: Tensor | None = None) -> Routing:
    """Return one routing for the tokens of all parts. join: joins the same tensor of every part, each (1, time, …)."""
    observation = functools.reduce(operator.add, [part.observation for part in parts])
    tensors = {
        name: join([getattr(part, name) for part in parts])
        for name in ("scores", "gates", "assignment", "passthrough")
        if getattr(parts[0], name) is not None
    }
    return Routing(observation=observation, loss=loss, **tensors)


class RoutingHistory(NamedTuple):
    """The part of a sequence's past that determines the routing of its next tokens at inference.

    state: the rule's state for this sequence, or None for the router's state. thresholds: (experts,), set if routing is
    exactly scores > thresholds with gates σ(scores) or softmax(scores). scores: (past, num_scores), the scores of
    previous tokens, or None if there are no tokens yet or the rule uses only a token's own scores.
    """

    state: Any = None
    thresholds: Tensor | None = None
    scores: Tensor | None = None


class Router(nn.Module):
    """Computes r = W_r x (paper, Eq. 1) in float32, for x of any dtype, and applies the routing rule.

    The rule's state is kept in buffers named `state_<field>`, which are saved with the model, are never cast, and are
    initialised even if the module was built on the meta device. group: the ranks that share a global pool. rate: the
    mean fanout at inference, see `at_rate`; None keeps the trained rate.
    """

    def __init__(self, d_model: int, rule: Rule, z_loss: float | None = None) -> None:
        super().__init__()
        self.rule = rule
        self.z_loss = z_loss
        self.group: dist.ProcessGroup | None = None
        self.rate: float | None = None
        self.weight = nn.Parameter(torch.empty(rule.num_scores, d_model))
        self._state_type = type(rule.init())
        for name, value in rule.init()._asdict().items():
            self.register_buffer(f"state_{name}", value.to(self.weight.device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight and reset the state, in place. On the meta device, do nothing."""
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
            self.reset_state()

    def forward(self, x: Tensor, pasts: Sequence[RoutingHistory] | None = None, mask: Tensor | None = None) -> Routing:
        """Return the routing of x (batch, time, d_model). The rule's state changes only in `update`.

        pasts: at inference, the past of each sequence that x continues. mask: (batch, time), False for tokens that go
        to no expert and do not affect the routing of other tokens.
        """
        if mask is not None:
            return self._route_counted(x, mask)
        with no_autocast(x):  # it would round the scores
            scores = self.score(x)
        if not self.training:
            return self.infer(scores, pasts)
        routing = self.rule.route(scores, self.state, training=True, group=self.group)
        if self.z_loss is not None:
            tokens = scores[..., 0].numel()
            z_loss = self.z_loss * scores.logsumexp(-1).square().sum() / max(tokens, 1)
            loss = z_loss if routing.loss is None else routing.loss + z_loss
            routing = Routing(**{**routing._asdict(), "loss": loss})  # torch 2.11 cannot trace a record's _replace
        return routing

    def score(self, x: Tensor) -> Tensor:
        """Return r = W_r x in float32."""
        scores: Tensor = apply(_Scores, x, self.weight)
        return scores

    def _route_counted(self, x: Tensor, mask: Tensor) -> Routing:
        """Route only the tokens in the mask; the routing is zero for all other tokens."""
        scopes = self.rule.scope(self.training), self.training and self.rule.pool_scope()
        if "sequence" in scopes and len(x):  # sequences of unequal lengths: one by one
            parts = [self.forward(of_row[counts][None]) for of_row, counts in zip(x, mask, strict=True)]
        else:
            parts = [self.forward(x[mask][None])]  # not a call, whose hooks would count the tokens twice

        def spread(values: list[Tensor]) -> Tensor:
            found = torch.cat(values, 1)[0]
            counts = mask.reshape(*mask.shape, *[1] * (found.ndim - 1))
            return found.new_zeros((*mask.shape, *found.shape[1:])).masked_scatter(counts, found)

        losses = [part.loss * part.scores.shape[1] for part in parts if part.loss is not None]
        return _joined(parts, spread, loss=sum(losses) / mask.sum().clamp(min=1) if losses else None)

    def past(self, rate: float | None = None) -> RoutingHistory:
        """Return the past of an empty sequence that is routed at `rate`, which defaults to the router's own rate.

        Raises the same errors as `at_rate`.
        """
        state = None if rate is None else self.at_rate(rate)
        of_scores = self.rule.sigmoid_gates or self.rule.softmax_gates
        return RoutingHistory(state, self.thresholds(rate) if of_scores else None)

    def infer(self, scores: Tensor, pasts: Sequence[RoutingHistory] | None) -> Routing:
        """Return the inference routing of scores (batch, time, num_scores)."""
        if not pasts or all(field is None for past in pasts for field in past):
            return self.rule.route(scores, self.at_rate(self.rate), training=False)
        thresholds = [past.thresholds for past in pasts if past.thresholds is not None]
        if len(thresholds) == len(pasts):  # rows with different states or rates, which `rule.route` takes one by one
            experts = self.rule.num_experts
            gates = weights_of("sigmoid" if self.rule.sigmoid_gates else "softmax", scores)[..., :experts]
            assignment = scores[..., :experts] > torch.stack(thresholds)[:, None]
            observation = observe(scores, assignment, gates)
            return Routing(scores=scores, gates=gates, assignment=assignment, observation=observation)
        rows = zip(scores, pasts, strict=True)
        return _joined([self._route_after(of_row[None], past) for of_row, past in rows], torch.cat)

    def _route_after(self, scores: Tensor, past: RoutingHistory) -> Routing:
        state = self.at_rate(self.rate) if past.state is None else past.state
        known = scores[:, :0] if past.scores is None else past.scores[None]
        whole = self.rule.route(torch.cat((known, scores), 1), state, training=False)
        new = slice(known.shape[1], None)
        gates, assignment = whole.gates[:, new], whole.assignment[:, new]
        copied = None if whole.passthrough is None else whole.passthrough[:, new]
        seen = observe(scores, assignment, gates)
        return Routing(scores=scores, gates=gates, assignment=assignment, observation=seen, passthrough=copied)

    @property
    def state(self) -> Any:
        """The rule's state, a NamedTuple whose tensors share memory with the buffers. Assigning a state copies it."""
        return self._state_type(*(getattr(self, f"state_{name}") for name in self._state_type._fields))

    @state.setter
    def state(self, state: Iterable[Tensor]) -> None:
        for old, new in zip(self.state, state, strict=True):
            old.copy_(new)

    def at_rate(self, rate: float | None) -> Any:
        """Return the state for which the mean fanout at inference is `rate`, or the trained state if `rate` is None.

        Raises ValueError if the rate is not between 0 and num_experts, or if the rule cannot change its rate.
        """
        return self.state if rate is None else self.rule.at_rate(self.state, rate)

    def thresholds(self, rate: float | None = None) -> Tensor | None:
        """Return the thresholds (experts,) for inference at `rate` or the router's own rate, or None if the rule has no
        thresholds. Raises the same errors as `at_rate`.
        """
        return self.rule.thresholds(self.at_rate(self.rate if rate is None else rate))

    @torch.no_grad()
    def update(self, observation: Observation) -> None:
        """Update the rule's state in place, once per optimizer step.

        An observation that is not finite is ignored, since a cutoff of NaN would stay NaN. Reporting it here would
        synchronize with the device, so callers report it with `scores_not_finite`.
        """
        finite = all_finite(observation.tensors().values())
        moved = self.rule.update(self.state, observation)
        self.state = [new.where(finite, old) for old, new in zip(self.state, moved, strict=True)]

    def reset_state(self) -> None:
        """Reset the state to its value before the first step, in place."""
        self.state = self.rule.init()

    def __getstate__(self) -> dict[str, Any]:
        """Return the contents of a copy or pickle: everything except the group, which belongs to this process."""
        return {**vars(self), "group": None}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load the state in its own dtypes, since assign=True would adopt the dtypes of the checkpoint."""
        for name, value in self.state._asdict().items():
            if (loaded := state_dict.get(f"{prefix}state_{name}")) is not None:
                state_dict[f"{prefix}state_{name}"] = loaded.to(value.dtype)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Move the state between devices without casting it, and initialise it when it leaves the meta device."""
        before = self.state
        super()._apply(fn, recurse)
        for name, old, first in zip(self._state_type._fields, before, self.rule.init(), strict=True):
            device = getattr(self, f"state_{name}").device
            source = first if old.is_meta and device.type != "meta" else old
            setattr(self, f"state_{name}", source.to(device))
        return self

"""Routing losses and rule updates for training loops that are not ours."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.module_tracker import ModuleTracker

from ..routing import Observation, Routing, all_finite, scores_not_finite, summed_over_ranks
from .router import Router


class _WithLoss(torch.autograd.Function):
    """Gates as they are; whoever takes their gradient takes that of scale · loss, too."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(loss)
        return gates.view_as(gates)

    @staticmethod
    def backward(ctx: Any, dgates: Tensor) -> tuple[Tensor, Tensor, None]:
        (loss,) = ctx.saved_tensors
        return dgates, torch.full_like(loss, ctx.scale), None


class Follower:
    """Gathers what the routers of a model see and moves their rules once per optimizer step; made by `follow`.

    loss_scale: as given to `follow`; it may be set anew before any forward, as a GradScaler's changes.
    observations: what each router has seen on this rank since the last step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        group: dist.ProcessGroup | None = None,
        loss_scale: float | None = None,
    ) -> None:
        self.loss_scale = loss_scale
        self.observations: dict[Router, Observation] = {}
        self._group = group
        self._loss: Tensor | float = 0.0
        self._losses: dict[Router, int] = {}  # how many since the last step
        self._has_seen = False
        self._names = {module: name for name, module in model.named_modules() if isinstance(module, Router)}
        if not self._names:
            name = type(model).__name__
            raise ValueError(f"model {name} has no Mixture-of-Experts layer to follow; build it with MoE(...)")
        self._groups = {router: router.group for router in self._names}
        self._handles: list[RemovableHandle] = [optimizer.register_step_post_hook(self._update)]
        for router in self._names:
            self._handles.append(router.register_forward_pre_hook(self._join))
            self._handles.append(router.register_forward_hook(self._gather))

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that train together; the default group once there is one, if no other was given."""
        return dist.group.WORLD if self._group is None and dist.is_initialized() else self._group

    def loss(self) -> Tensor | float:
        """The routing losses of all forwards since the last call, summed over layers and micro-batches; 0.0 if none.

        For logging: it has no gradient, since backward adds that by itself, so that adding it to a loss adds its value.
        """
        total, self._loss = self._loss, 0.0
        return total

    def remove(self) -> None:
        """Stop following."""
        for handle in self._handles:
            handle.remove()
        for router, group in self._groups.items():
            router.group = group

    def _join(self, router: nn.Module, _inputs: Any) -> None:
        assert isinstance(router, Router)
        router.group = self.group  # now, since the default group may be made after `follow`

    def _gather(self, router: nn.Module, _inputs: Any, routing: Routing) -> Routing | None:
        assert isinstance(router, Router)
        if not router.training:
            return None
        # Inside backward this is a recomputation under activation checkpointing, seen already.
        if not ModuleTracker().is_bw:
            seen = self.observations.get(router)
            self.observations[router] = routing.observation if seen is None else seen + routing.observation
            if routing.loss is not None:
                self._loss = self._loss + routing.loss.detach()
                self._losses[router] = self._losses.get(router, 0) + 1
        if routing.loss is None:
            return None
        # Through the gates, on which the layer's output depends, so that backward meets it inside of checkpointing and
        # FSDP, too; what is handed on has no gradient, lest a model that adds it counts it twice.
        scale = 1.0 if self.loss_scale is None else self.loss_scale
        gates = _WithLoss.apply(routing.gates, routing.loss, scale)
        return Routing(**{**routing._asdict(), "gates": gates, "loss": routing.loss.detach()})

    def _update(self, *_: Any) -> None:
        self._tell_misuse()
        seen = dict(self.observations)
        self.observations.clear()
        self._losses.clear()
        if self.group is not None:  # a rank that saw nothing takes part
            mine = [seen[router] if router in seen else _nothing_seen(router) for router in self._names]
            named = [observation.tensors() for observation in mine]
            sums = iter(summed_over_ranks([tensor for tensors in named for tensor in tensors.values()], self.group))
            total = [Observation.from_tensors({name: next(sums) for name in tensors}) for tensors in named]
            tokens = torch.stack([observation.tokens for observation in total]).tolist()
            seen = {router: total[i] for i, router in enumerate(self._names) if tokens[i] > 0}
        if seen and not all_finite(t for observation in seen.values() for t in observation.tensors().values()):
            told = (scores_not_finite(observation, self._names[router]) for router, observation in seen.items())
            warnings.warn(f"{next(filter(None, told))}; this step moved no cutoffs and no biases", stacklevel=2)
            return
        for router, observation in seen.items():
            router.update(observation)

    def _tell_misuse(self) -> None:
        """Warn once of a loop that cannot mean what it does."""
        if not (self.observations or self._has_seen):
            warnings.warn(
                "follow has seen no forward before the optimizer's first step, so that cutoffs and biases stay as they "
                "are; call model.train(), and follow before the model is first run by torch.compile",
                stacklevel=3,
            )
        self._has_seen = True
        micro_batches = max(self._losses.values(), default=1)
        if micro_batches > 1 and self.loss_scale is None:
            self.loss_scale = 1.0
            warnings.warn(
                f"{micro_batches} forwards before one optimizer step, the routing losses of each with weight 1; give "
                f"follow(…, loss_scale=1 / {micro_batches}) if the loop divides its loss by {micro_batches}, or "
                "loss_scale=1 if it adds them up",
                stacklevel=3,
            )


def _nothing_seen(router: Router) -> Observation:
    """The observation of a forward in training of no tokens."""
    scores = torch.empty(0, 0, len(router.weight), device=router.weight.device)
    return router.rule.route(scores, router.state, training=True).observation


def follow(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    group: dist.ProcessGroup | None = None,
    loss_scale: float | None = None,
) -> Follower:
    """Train the MoE layers in `model` as a loop of ours would: backward adds the gradients of the rules' losses to the
    loop's own, and each `optimizer.step()` moves the rules by what was seen since the last, summed over ranks.

    Only forwards in training mode count. Nothing is left to be added by hand: a routing loss reaches its parameters
    with the gradient of the layer's output, under DDP, FSDP2 and activation checkpointing, too.

    group: the ranks that train together, each calling forward and `step` equally often; global pools and global loads
    are formed over them. None is torch.distributed's default group where it is initialised, else this process alone.
    loss_scale: what the loop multiplies the loss of a micro-batch by before backward, since routing losses need the
    same: 1 / gradient accumulation steps, times the scale of a GradScaler; None is 1, and warns of accumulation.
    Raises ValueError if the model has no MoE layer.
    """
    return Follower(model, optimizer, group=group, loss_scale=loss_scale)

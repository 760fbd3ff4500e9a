"""Routing losses and rule updates for training loops outside this package."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle
from torch.utils.module_tracker import ModuleTracker

from ..routing import Observation, Routing, all_finite, scores_not_finite, summed_over_ranks
from .router import Router


class _WithLoss(torch.autograd.Function):
    """The identity on gates; its backward also adds the gradient of scale · loss."""

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
    """Sums the observations of a model's routers and updates their rules once per optimizer step; made by `follow`.

    loss_scale: as in `follow`; it may be set before any forward, for example when a GradScaler changes its scale.
    observations: each router's observation on this rank since the last step.
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
        self._losses: dict[Router, int] = {}  # number of losses since the last step
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
        """The ranks that train together: the given group, or else the default group once it exists."""
        return dist.group.WORLD if self._group is None and dist.is_initialized() else self._group

    def loss(self) -> Tensor | float:
        """Return the routing losses of all forwards since the last call, summed over layers and micro-batches, or 0.0.

        For logging: the result has no gradient, since backward adds it already; adding it to a loss changes only the
        loss's value.
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
        router.group = self.group  # set here, since the default group may be created after `follow`

    def _gather(self, router: nn.Module, _inputs: Any, routing: Routing) -> Routing | None:
        assert isinstance(router, Router)
        if not router.training:
            return None
        # A forward inside backward is recomputation under activation checkpointing, which was counted already.
        if not ModuleTracker().is_bw:
            seen = self.observations.get(router)
            self.observations[router] = routing.observation if seen is None else seen + routing.observation
            if routing.loss is not None:
                self._loss = self._loss + routing.loss.detach()
                self._losses[router] = self._losses.get(router, 0) + 1
        if routing.loss is None:
            return None
        # The loss enters through the gates, on which the layer's output depends, so that backward reaches it under
        # checkpointing and FSDP too. The loss passed on is detached, so that a model that adds it does not count twice.
        scale = 1.0 if self.loss_scale is None else self.loss_scale
        gates = _WithLoss.apply(routing.gates, routing.loss, scale)
        return Routing(**{**routing._asdict(), "gates": gates, "loss": routing.loss.detach()})

    def _update(self, *_: Any) -> None:
        self._tell_misuse()
        seen = dict(self.observations)
        self.observations.clear()
        self._losses.clear()
        if self.group is not None:  # a rank without observations takes part too
            mine = [seen[router] if router in seen else _nothing_seen(router) for router in self._names]
            tensors, structure = tree_flatten(mine)
            total: list[Observation] = tree_unflatten(summed_over_ranks(tensors, self.group), structure)
            tokens = torch.stack([observation.tokens for observation in total]).tolist()
            seen = {router: total[i] for i, router in enumerate(self._names) if tokens[i] > 0}
        if seen and not all_finite(t for observation in seen.values() for t in observation.tensors().values()):
            told = (scores_not_finite(observation, self._names[router]) for router, observation in seen.items())
            warnings.warn(f"{next(filter(None, told))}; this step moved no cutoffs and no biases", stacklevel=2)
            return
        for router, observation in seen.items():
            router.update(observation)

    def _tell_misuse(self) -> None:
        """Warn once about likely mistakes in the training loop."""
        if not (self.observations or self._has_seen):
            warnings.warn(
                "follow has seen no forward before the optimizer's first step, so cutoffs and biases do not change; "
                "call model.train(), and call follow before torch.compile first runs the model",
                stacklevel=3,
            )
        self._has_seen = True
        micro_batches = max(self._losses.values(), default=1)
        if micro_batches > 1 and self.loss_scale is None:
            self.loss_scale = 1.0
            warnings.warn(
                f"{micro_batches} forwards before one optimizer step, the routing losses of each with weight 1; use "
                f"follow(…, loss_scale=1 / {micro_batches}) if the loop divides its loss by {micro_batches}, or "
                "loss_scale=1 if it adds them up",
                stacklevel=3,
            )


def _nothing_seen(router: Router) -> Observation:
    """Return the observation of a training forward without tokens."""
    scores = torch.empty(0, 1, len(router.weight), device=router.weight.device)
    return router.rule.route(scores, router.state, training=True).observation


def follow(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    group: dist.ProcessGroup | None = None,
    loss_scale: float | None = None,
) -> Follower:
    """Train the MoE layers in `model` within any training loop: backward adds the gradients of routing losses, and each
    `optimizer.step()` updates the rules with the observations since the last step, summed over ranks.

    Only forwards in training mode count. The loop need not add routing losses: their gradients flow with the gradient
    of the layer's output, under DDP, FSDP2 and activation checkpointing too.

    group: the ranks that train together, each calling forward and `step` equally often; global pools and global loads
    are formed over them. None is torch.distributed's default group if initialised, else this process alone.
    loss_scale: the factor that the loop applies to a micro-batch's loss before backward, to be applied to routing
    losses too: 1 / gradient accumulation steps, times the scale of a GradScaler. None is 1 and warns of accumulation.
    Raises ValueError if the model has no MoE layer.
    """
    return Follower(model, optimizer, group=group, loss_scale=loss_scale)

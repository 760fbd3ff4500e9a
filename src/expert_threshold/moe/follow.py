"""Routing losses and rule updates for training loops outside this package."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.variable import Variable
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from ..routing import Observation, Routing, all_finite, scores_not_finite, summed_over_ranks
from .router import Router


class _Watched(torch.autograd.Function):
    """The identity on gates. Its first backward calls `reached`; every backward adds the gradient of scale · loss."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, loss: Tensor | None, scale: float, reached: Callable[[], None]) -> Tensor:
        ctx.scale, ctx.reached = scale, reached
        return gates.view_as(gates)

    @staticmethod
    def backward(ctx: Any, dgates: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        if ctx.reached is not None:
            ctx.reached()
            ctx.reached = None  # a graph retained for another backward is still one forward
        return dgates, dgates.new_full((), ctx.scale) if ctx.needs_input_grad[1] else None, None, None


class FollowerHook:
    """Reports each forward of a router to its follower. Copies of the hook, in copies of the model, do nothing."""

    def __init__(self, follower: Follower | None = None, call: Callable[..., Any] | None = None) -> None:
        self.follower = follower
        # Tracing would run backward's side effects. A decorator would import the compiler along with this module.
        self._call = None if call is None else torch.compiler.disable(call)

    def __call__(self, *args: Any) -> Any:
        return None if self._call is None else self._call(*args)

    def __reduce__(self) -> tuple[type[FollowerHook], tuple[()]]:
        return FollowerHook, ()


class Follower:
    """Sums the observations of a model's routers and updates their rules once per optimizer step. Created by `follow`.

    A forward counts as soon as backward reaches its gates, unless its gradients are later set to None. A batch thus
    changes no rule if it has no backward, is skipped by a GradScaler or is discarded by the loop. Recomputation under
    activation checkpointing is not counted twice.

    loss_scale: as in `follow`; it may be set before any forward, for example when a GradScaler changes its scale.
    observations: the observation of each router on this rank since the last step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup | None,
        loss_scale: float | None,
    ) -> None:
        self.loss_scale = loss_scale
        self.observations: dict[Router, Observation] = {}
        self._group = group
        self._model, self._optimizer = model, _innermost(optimizer)
        self._loss: Tensor | float = 0.0
        self._passes: dict[Router, set[int]] = {}  # backward passes with a loss since the last step
        self._pass = -1
        self._with_gradient: list[Tensor] = []  # parameters, after the last backward pass
        self._has_stepped = self._reached_evaluation = False
        self._names = {module: name for name, module in model.named_modules() if isinstance(module, Router)}
        if not self._names:
            name = type(model).__name__
            raise ValueError(f"model {name} has no Mixture-of-Experts layer to follow; build it with MoE(...)")
        for router in self._names:
            for hook in [*router._forward_hooks.values()]:
                if isinstance(hook, FollowerHook) and hook.follower is not None:  # two would update each rule twice
                    if {*hook.follower._model.modules()} & (hook.follower._names.keys() - self._names.keys()):
                        raise ValueError("the model is part of one that is followed; call follower.remove() first")
                    hook.follower.remove()
        self._groups = {router: router.group for router in self._names}
        self._handles: list[RemovableHandle] = [
            self._optimizer.register_step_pre_hook(self._forget_discarded),
            self._optimizer.register_step_post_hook(self._update),
        ]
        for router in self._names:
            self._handles.append(router.register_forward_pre_hook(FollowerHook(self, self._join)))
            self._handles.append(router.register_forward_hook(FollowerHook(self, self._gather)))

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that train together: the group passed to `follow`, or the default group once it exists."""
        return dist.group.WORLD if self._group is None and dist.is_initialized() else self._group

    def loss(self) -> Tensor | float:
        """Return the routing losses of all forwards since the last call, summed over layers and micro-batches, or 0.0.

        Use the result for logging only: it has no gradient, since backward already adds the losses' gradients.
        """
        total, self._loss = self._loss, 0.0
        return total

    def remove(self) -> None:
        """Stop following."""
        for handle in self._handles:
            handle.remove()
        for router, group in self._groups.items():
            router.group = group

    def _join(self, router: Router, _inputs: Any) -> None:
        router.group = self.group  # set here, since the default group may be created after `follow`

    def _gather(self, router: Router, _inputs: Any, routing: Routing) -> Routing | None:
        recomputed = torch._C._current_graph_task_id() != -1  # inside backward, under activation checkpointing
        if routing.loss is not None and not recomputed:
            self._loss = self._loss + routing.loss.detach()
        reached = self._note_evaluation
        if router.training:
            reached = partial(self._count, router, routing.observation, routing.loss is not None)
        if not routing.gates.requires_grad:  # backward does not reach it: nothing below trains, or nothing at all
            if torch.is_grad_enabled() and not recomputed:
                reached()
            return None
        # The loss enters through the gates, on which the layer's output depends, so backward reaches it even under
        # checkpointing and FSDP. The returned loss is detached, so that a model that adds it does not count it twice.
        scale = 1.0 if self.loss_scale is None else self.loss_scale
        gates = _Watched.apply(routing.gates, routing.loss, scale, reached)
        loss = None if routing.loss is None else routing.loss.detach()
        return Routing(**{**routing._asdict(), "gates": gates, "loss": loss})

    def _note_evaluation(self) -> None:
        self._reached_evaluation = True

    def _count(self, router: Router, observation: Observation, has_loss: bool) -> None:
        current = torch._C._current_graph_task_id()
        if current != self._pass:
            self._pass = current
            # This backward may have filled gradients already, but not this router's. (FSDP replaces the weight.)
            own = [parameter for parameter in self._with_gradient if parameter is router.weight]
            if any(parameter.grad is None for parameter in own or self._with_gradient):
                self._forget()  # the gradients of all forwards counted so far were discarded
            if current != -1:
                Variable._execution_engine.queue_callback(self._note_gradients)
        seen = self.observations.get(router)
        self.observations[router] = observation if seen is None else seen + observation
        if has_loss:
            self._passes.setdefault(router, set()).add(current)

    def _note_gradients(self) -> None:
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        self._with_gradient = [parameter for parameter in parameters if parameter.grad is not None]

    def _forget_discarded(self, *_: Any) -> None:
        # A loop may set some gradients to None to freeze parameters; only if all are None was the batch discarded.
        if self._with_gradient and all(parameter.grad is None for parameter in self._with_gradient):
            self._forget()

    def _forget(self) -> None:
        self.observations.clear()
        self._passes.clear()
        self._with_gradient = []

    def _update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        found_inf = getattr(optimizer, "found_inf", None)  # a fused optimizer skips a GradScaler's step by itself
        if found_inf is not None and found_inf > 0:
            self._forget()
            return
        self._warn_of_misuse()
        seen = dict(self.observations)
        self._forget()
        if self.group is not None:  # a rank without observations joins in too
            mine = [seen[router] if router in seen else _nothing_seen(router) for router in self._names]
            tensors, structure = tree_flatten(mine)
            total: list[Observation] = tree_unflatten(summed_over_ranks(tensors, self.group), structure)
            tokens = torch.stack([observation.tokens for observation in total]).tolist()
            seen = {router: total[i] for i, router in enumerate(self._names) if tokens[i] > 0}
        if seen and not all_finite(t for observation in seen.values() for t in observation.tensors().values()):
            messages = (scores_not_finite(observation, self._names[router]) for router, observation in seen.items())
            warnings.warn(f"{next(filter(None, messages))}; this step did not update cutoffs or biases", stacklevel=2)
            return
        for router, observation in seen.items():
            router.update(observation)

    def _warn_of_misuse(self) -> None:
        """Warn once about each likely mistake in the training loop."""
        if not self.observations and (self._reached_evaluation or not self._has_stepped):
            warnings.warn(
                "no forward pass in training mode preceded this optimizer step, so cutoffs and biases did not "
                "change; call model.train(), and call follow() before the compiled model runs for the first time",
                stacklevel=3,
            )
        self._has_stepped, self._reached_evaluation = True, False
        micro_batches = max(map(len, self._passes.values()), default=1)
        if micro_batches > 1 and self.loss_scale is None:
            self.loss_scale = 1.0
            warnings.warn(
                f"{micro_batches} backward passes before one optimizer step each added the routing losses with weight "
                f"1; use follow(…, loss_scale=1 / {micro_batches}) if the loop divides its losses by {micro_batches}, "
                "or loss_scale=1 if it sums them",
                stacklevel=3,
            )


def _innermost(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer in wrappers such as Accelerate's, which have no hooks. Raises ValueError if it has none."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = "None" if optimizer is None else f"a {type(optimizer).__name__}"
        raise ValueError(
            f"optimizer is {kind}, not a torch.optim.Optimizer; pass the optimizer that the loop steps last, since "
            "each of its steps updates the rules"
        )
    return optimizer


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
    """Train the MoE layers of `model` in any training loop. Backward adds the gradients of routing losses, and each
    `optimizer.step()` updates the routing rules with all ranks' observations since the last step.

    Only forwards in training mode count. The loop does not need to add routing losses, because their gradients are
    added to those of the layer's output, even under DDP, FSDP2 and activation checkpointing.

    group: the ranks that train together and call forward and `step` equally often; global pools and global loads span
    them. Defaults to the default group of torch.distributed if it is initialised, or else to this process. loss_scale:
    the factor by which the loop multiplies the loss of a micro-batch before backward, such as 1 / gradient accumulation
    steps times a GradScaler's scale. It also applies to routing losses. None means 1, with a warning under
    accumulation. Raises ValueError if the model has no MoE layer.
    """
    return Follower(model, optimizer, group, loss_scale)

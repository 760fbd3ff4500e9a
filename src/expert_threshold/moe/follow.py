"""Rule updates for training loops that are not ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.module_tracker import ModuleTracker

from ..routing import Observation, Routing
from .router import Router


class Follower:
    """Gathers what the routers of a model see and moves their rules once per optimizer step; made by `follow`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.observations: dict[Router, Observation] = {}
        self._losses: list[Tensor] = []
        routers = [module for module in model.modules() if isinstance(module, Router)]
        if not routers:
            name = type(model).__name__
            raise ValueError(f"model {name} has no Mixture-of-Experts layer to follow; build it with MoE(...)")
        self._handles: list[RemovableHandle] = [router.register_forward_hook(self._gather) for router in routers]
        self._handles.append(optimizer.register_step_post_hook(self._update))

    def loss(self) -> Tensor | float:
        """The routing losses of all forwards since the last call, to be added to the training loss; 0.0 if none."""
        total: Tensor | float = sum(self._losses, 0.0)
        self._losses.clear()
        return total

    def remove(self) -> None:
        """Stop following."""
        for handle in self._handles:
            handle.remove()

    def _gather(self, router: nn.Module, _inputs: Any, routing: Routing) -> None:
        assert isinstance(router, Router)
        # Inside backward this is a recomputation under activation checkpointing, seen already.
        if not router.training or ModuleTracker().is_bw:
            return
        seen = self.observations.get(router)
        self.observations[router] = routing.observation if seen is None else seen + routing.observation
        if routing.loss is None:
            return
        if router.weight.requires_grad and not routing.loss.requires_grad:
            raise ValueError(
                "routing loss under no_grad cannot train; use checkpoint(..., use_reentrant=False) or model.eval()"
            )
        self._losses.append(routing.loss)

    def _update(self, *_: Any) -> None:
        for router, observation in self.observations.items():
            router.update(observation)
        self.observations.clear()
        self._losses.clear()


def follow(model: nn.Module, optimizer: torch.optim.Optimizer) -> Follower:
    """Move the rules of every MoE layer in `model` after each `optimizer.step()`, by what was seen since the last.

    Only forwards in training mode count. Raises ValueError if the model has no MoE layer.
    """
    return Follower(model, optimizer)

"""Expert threshold instead of torchtitan's top-k router, through overrides, without changing torchtitan's code:

    --override.imports torchtitan_router.threshold_router torchtitan_router.threshold_dispatcher

Tested with torchtitan 0.3.0. `top_k` becomes the mean fanout; gates use `score_func`. For a single rank, or for
data-parallel ranks with separate pools; the loss-free biases (`load_balance_coeff`) have no effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchtitan.config import derive, override
from torchtitan.models.common.moe import TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import LocalDispatchMetadata, LocalTokenDispatcher

from expert_threshold.routing import CutoffState, ExpertThreshold


class ThresholdRouter(TokenChoiceTopKRouter):
    """A router whose forward returns K = num_experts slots per token, with gate 0 where the token does not go."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        decay: float = 0.99
        warmup_steps: int = 100

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        options: Any = {"gate": config.score_func, "gate_scale": config.route_scale, "pool": "batch"}
        if config.route_norm:
            options["gate"] = {"sigmoid": "sigmoid_normalised", "softmax": "softmax_chosen"}[config.score_func]
        self.rule = ExpertThreshold(
            config.num_experts, config.top_k, decay=config.decay, warmup_steps=config.warmup_steps, **options
        )
        self.seen: Any = None
        self._init_self_buffers()
        register_optimizer_step_post_hook(self.update)  # of any optimizer; the first step after a backward counts

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        for name, value in self.rule.init()._asdict().items():
            self.register_buffer(f"state_{name}", value.to(buffer_device))

    @property
    def state(self) -> CutoffState:
        return CutoffState(*(getattr(self, f"state_{name}") for name in CutoffState._fields))

    def forward(self, x: Tensor, _: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            scores = self.gate(x.float()).float()
        routing = self.rule.route(scores.view(1, -1, self.num_experts), self.state, training=self.training)
        recomputed = torch._C._current_graph_task_id() != -1  # inside backward, under activation checkpointing
        if self.training and torch.is_grad_enabled() and not recomputed:
            self.seen = routing.observation if self.seen is None else self.seen + routing.observation
        ids = torch.arange(self.num_experts, device=x.device).expand(scores.shape)
        gates = torch.where(routing.assignment, routing.gates, 0)
        return gates.view_as(scores), ids, routing.gates.view_as(scores)

    @torch.no_grad()
    def update(self, *_: Any) -> None:
        if self.seen is not None:
            for old, new in zip(self.state, self.rule.update(self.state, self.seen), strict=True):
                old.copy_(new)
            self.seen = None


class ThresholdDispatcher(LocalTokenDispatcher):
    """Sends a token to the experts for which its gate is not 0."""

    @dataclass(kw_only=True, slots=True)
    class Config(LocalTokenDispatcher.Config):
        pass

    def dispatch(self, *given: Tensor) -> tuple[Tensor, Tensor, LocalDispatchMetadata]:
        x, gates, *_ = given  # (tokens, width), (tokens, experts)
        experts, tokens = gates.T.nonzero(as_tuple=True)  # sorted by expert
        metadata = LocalDispatchMetadata(
            token_indices_experts_sorted_N=tokens, topk_scores_experts_sorted_N=gates[tokens, experts]
        )
        return x[tokens], torch.bincount(experts, minlength=self.num_experts), metadata


@override(target=TokenChoiceTopKRouter.Config, description="expert threshold")
def threshold_router(config: TokenChoiceTopKRouter.Config, **options: Any) -> ThresholdRouter.Config:
    return derive(config, ThresholdRouter.Config, **options)


@override(target=LocalTokenDispatcher.Config, description="variable fanout", exact=True)
def threshold_dispatcher(config: LocalTokenDispatcher.Config) -> ThresholdDispatcher.Config:
    return derive(config, ThresholdDispatcher.Config)

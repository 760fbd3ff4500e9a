"""Expert threshold as a router in OLMo-core: give a `MoEConfig` this `ThresholdRouterConfig`.

Tested with OLMo-core 3.0.0. `top_k` is the number of slots per token, and so its maximum number of experts; unused
slots have weight 0 but are computed. The trainer calls `post_batch` once per optimizer step, which updates the cutoffs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from olmo_core.nn.moe.router import MoELinearRouter, MoERouterConfig
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from expert_threshold.routing import CutoffState, ExpertThreshold, summed_over_ranks


class ThresholdRouter(MoELinearRouter):
    def __init__(self, *, experts_per_token: float, decay: float, warmup_steps: int, **options: Any) -> None:
        super().__init__(**options)
        self.rule = ExpertThreshold(
            self.num_experts, experts_per_token, decay=decay, warmup_steps=warmup_steps, pool="batch"
        )
        for name, value in self.rule.init()._asdict().items():
            self.register_buffer(f"state_{name}", value)
        self.seen: Any = None

    @property
    def state(self) -> CutoffState:
        return CutoffState(*(getattr(self, f"state_{name}") for name in CutoffState._fields))

    def get_top_k(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and ids (batch, time, top_k). scores: gates; only their order over tokens matters."""
        routing = self.rule.route(scores.detach(), self.state, training=self.training)
        if self.training and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self.seen = routing.observation if self.seen is None else self.seen + routing.observation
        ids = scores.masked_fill(~routing.assignment, -torch.inf).topk(self.top_k, dim=-1).indices
        return scores.gather(-1, ids) * routing.assignment.gather(-1, ids), ids

    @torch.no_grad()
    def post_batch(self, dry_run: bool = False) -> None:
        super().post_batch(dry_run)
        if self.seen is None:
            return
        if dist.is_initialized():
            tensors, structure = tree_flatten(self.seen)
            self.seen = tree_unflatten(summed_over_ranks(tensors, self.group or dist.group.WORLD), structure)
        if not dry_run:
            for old, new in zip(self.state, self.rule.update(self.state, self.seen), strict=True):
                old.copy_(new)
        self.seen = None


@dataclass
class ThresholdRouterConfig(MoERouterConfig):
    experts_per_token: float = 1.0
    decay: float = 0.99
    warmup_steps: int = 100

    def build(self, d_model: int, num_experts: int, *, dtype: Any = None, **options: Any) -> ThresholdRouter:
        own = self.as_dict(exclude_none=True, recurse=False)
        own["dtype"] = self.dtype.as_pt() if self.dtype is not None else dtype or torch.float32
        del own["name"]
        return ThresholdRouter(d_model=d_model, num_experts=num_experts, **own, **options)

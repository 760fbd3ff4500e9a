"""The routed sum and the shared experts together, by C++ kernels for this CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.cpu import TILE, available, reason
from ...kernels.cpu import experts as kernels
from ..experts import Experts, FeedForward, plain
from .backend import Backend
from .grouped import grouped


class Cpu(Backend):
    """Calls the C++ kernels; small numbers of rows, which cost more to pack than they save, go to `grouped`."""

    name = "cpu"

    def why_not(self, x: Tensor, experts: Experts) -> str | None:
        if kernels.computes(x, experts.down.shape[2], experts.activation.name):
            return None
        if not x.is_cpu:
            return "needs a CPU; use --device cpu, or dispatch='auto'"
        if not available():
            return f"has no kernels here: {reason()}; use dispatch='auto'"
        if x.dtype != torch.bfloat16:
            return f"computes in bfloat16 and not in {x.dtype}; use dispatch='grouped'"
        if experts.activation.name != "relu2":
            return f"computes relu2 and not {experts.activation.name}; use dispatch='grouped'"
        return f"needs widths that are multiples of {TILE}, and matrices that fit; use dispatch='grouped'"

    def pays(self, x: Tensor, experts: Experts, rows: int | None) -> bool:
        return kernels.applies(x, experts.down.shape[2], experts.activation.name)

    def routed_sum(self, x: Tensor, gates: Tensor, assignment: Tensor, experts: Experts, rows: int | None) -> Tensor:
        if not self.pays(x, experts, rows):
            self.require(x, experts)
            return grouped.routed_sum(x, gates, assignment, experts, rows)
        return kernels.routed_sum(x, gates, assignment, (experts.up.to(x.dtype), experts.down.to(x.dtype)), rows=rows)

    def fused_sum(
        self, x: Tensor, gates: Tensor, assignment: Tensor, experts: Experts, shared: FeedForward, rows: int | None
    ) -> Tensor | None:
        if not plain(shared, shared.up, shared.down) or not self.pays(x, experts, rows):
            return None
        if not kernels.applies(x, shared.down.weight.shape[-1], experts.activation.name):
            return None
        weights = (experts.up, experts.down, shared.up.weight, shared.down.weight)
        up, down, *alone = (weight.to(x.dtype) for weight in weights)
        return kernels.routed_sum(x, gates, assignment, (up, down), (alone[0], alone[1]), rows)


cpu = Cpu()

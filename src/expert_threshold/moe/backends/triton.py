"""The routed sum in Triton kernels for NVIDIA GPUs (extra `triton`); nothing waits for the device."""

from __future__ import annotations

from torch import Tensor

from ...install import install
from ..experts import Experts
from .backend import Backend


class Triton(Backend):
    """Calls the kernels of `kernels/gpu`, imported on first use; chosen only by name."""

    name = "triton"

    def why_not(self, x: Tensor, experts: Experts) -> str | None:
        try:
            from ...kernels.gpu.experts import DTYPES, INTERPRETED
        except ModuleNotFoundError as error:
            return f"needs {error.name}, which is missing; run: {install('triton')}"
        if not (x.is_cuda or INTERPRETED):
            return f"needs a CUDA GPU and not {x.device.type!r}; use dispatch='auto'"
        if x.dtype not in DTYPES:
            return f"computes in float32 or less and not in {x.dtype}; use dispatch='grouped'"
        return None

    def routed_sum(self, x: Tensor, gates: Tensor, assignment: Tensor, experts: Experts, rows: int | None) -> Tensor:
        self.require(x, experts)
        from ...kernels.gpu.experts import routed_sum

        return routed_sum(x, gates, assignment, experts.ups(x.dtype), experts.down.to(x.dtype), rows)


triton = Triton()

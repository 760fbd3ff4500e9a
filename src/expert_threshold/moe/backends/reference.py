"""The definition: y_t = Σ_i z[t,i] · g[t,i] · expert_i(x_t), one expert after the other (paper, Eq. 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..experts import Experts, up_project
from .backend import Backend


class Reference(Backend):
    """Computes one expert after the other, on its own tokens only.

    So a NaN in another token's row cannot reach an expert's output.
    """

    name = "reference"

    def routed_sum(self, x: Tensor, gates: Tensor, assignment: Tensor, experts: Experts, rows: int | None) -> Tensor:
        y = torch.zeros_like(x)
        ups, down = experts.ups(x.dtype), experts.down.to(x.dtype)
        tokens = assignment.T.nonzero()[:, 1]
        for i, chosen in enumerate(tokens.split(assignment.sum(0).tolist())):
            h = up_project(x[chosen], tuple(up[i] for up in ups))
            out = _activate(h, experts.activation.width) @ down[i].T
            y = y.index_add(0, chosen, out * gates[chosen, i, None].to(x.dtype))
        return y


def _activate(h: Tensor, width: int) -> Tensor:
    if width == 1:
        return h.relu().square()
    gate, up = h.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


reference = Reference()

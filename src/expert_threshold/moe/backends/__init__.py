"""Ways to compute the routed sum. Each equals `reference` in outputs and in all gradients."""

from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from ...install import install
from ...kernels.cpu import experts as kernels
from ..experts import Experts, FeedForward
from .grouped import grouped
from .reference import reference
from .static import is_native, static


class Dispatch(Protocol):
    def __call__(
        self, x: Tensor, gates: Tensor, assignment: Tensor, experts: Experts, rows: int | None = None
    ) -> Tensor:
        """x: (tokens, d_model); gates: (tokens, experts) float32; assignment: (tokens, experts) bool. Returns y like x.

        rows: at least as many as pairs of token and expert are assigned; None where that is not known without counting.
        """


def _triton(x: Tensor, gates: Tensor, assignment: Tensor, experts: Experts, rows: int | None = None) -> Tensor:
    """The kernels of `kernels/gpu`, imported when they are first called. Raises ValueError where they cannot run."""
    try:
        from ...kernels.gpu.experts import DTYPES, INTERPRETED, routed_sum
    except ModuleNotFoundError as error:
        raise ValueError(f"dispatch='triton' needs {error.name}, which is missing; run: {install('triton')}") from None
    if not (x.is_cuda or INTERPRETED):
        raise ValueError(f"dispatch='triton' needs a CUDA GPU and not {x.device.type!r}; use dispatch='auto'")
    if x.dtype not in DTYPES:
        raise ValueError(f"dispatch='triton' computes in float32 or less and not in {x.dtype}; use dispatch='grouped'")
    return routed_sum(x, gates, assignment, experts.ups(x.dtype), experts.down.to(x.dtype), rows)


DISPATCHES: dict[str, Dispatch] = {"reference": reference, "grouped": grouped, "static": static, "triton": _triton}

if TYPE_CHECKING:
    DispatchName = str
else:  # made from the table, so that a command line offers what there is
    DispatchName = Literal[("auto", *DISPATCHES)]


def auto(x: Tensor, gates: Tensor, assignment: Tensor, experts: Experts, rows: int | None = None) -> Tensor:
    """`static` where loads are bounded and segments are multiplied without waiting for their ends; else `grouped`."""
    fits = rows is not None and is_native(x, *experts.down.shape[1:])
    return (static if fits else grouped)(x, gates, assignment, experts, rows)


def add_shared(
    dispatch: Dispatch,
    x: Tensor,
    gates: Tensor,
    assignment: Tensor,
    experts: Experts,
    shared: FeedForward | None,
    rows: int | None,
) -> Tensor:
    """The routed sum and what every token's shared experts make of it; at once where one kernel does both."""
    # What hangs on the shared experts' call, as hooks do, is not passed by.
    plain = type(shared) is FeedForward and not (shared._forward_hooks or shared._forward_pre_hooks)
    if shared is not None and plain and dispatch in (auto, grouped):
        weights = (experts.up, experts.down, shared.up.weight, shared.down.weight)
        hidden = (experts.down.shape[-1], shared.down.weight.shape[-1])
        if all(kernels.applies(x, width, experts.activation.name) for width in hidden):
            up, down, *alone = (weight.to(x.dtype) for weight in weights)
            return kernels.routed_sum(x, gates, assignment, (up, down), (alone[0], alone[1]), rows)
    y = dispatch(x, gates, assignment, experts, rows)
    return y if shared is None else y.add_(shared(x))


def dispatch_named(name: str) -> Dispatch:
    """The dispatch of that name. Raises ValueError if there is none."""
    if name == "auto":
        return auto
    if name not in DISPATCHES:
        raise ValueError(f"dispatch={name!r} is unknown; use one of auto, {', '.join(DISPATCHES)}")
    return DISPATCHES[name]


def require_dispatch(name: str, device: torch.device) -> None:
    """Raises ValueError where the dispatch of that name cannot compute on the device; tried on no tokens."""
    nothing = torch.zeros(0, 1, device=device)
    dispatch_named(name)(nothing, nothing, nothing.bool(), Experts(1, 1, 1).to(device))


__all__ = [
    "DISPATCHES",
    "Dispatch",
    "DispatchName",
    "add_shared",
    "dispatch_named",
    "grouped",
    "reference",
    "require_dispatch",
    "static",
]

"""Ways to compute the routed sum. Each equals `reference` in outputs and in all gradients."""

from collections.abc import Callable

from torch import Tensor

from ..experts import Experts
from .grouped import grouped
from .reference import reference

Dispatch = Callable[[Tensor, Tensor, Tensor, Experts], Tensor]

DISPATCHES: dict[str, Dispatch] = {"reference": reference, "grouped": grouped}


def dispatch_named(name: str) -> Dispatch:
    """The dispatch of that name; 'auto' is the fastest. Raises ValueError if there is none."""
    if name == "auto":
        return grouped
    if name not in DISPATCHES:
        raise ValueError(f"dispatch={name!r} is unknown; use one of auto, {', '.join(DISPATCHES)}")
    return DISPATCHES[name]


__all__ = ["DISPATCHES", "Dispatch", "dispatch_named", "grouped", "reference"]

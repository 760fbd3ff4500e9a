"""The table of backends, each equal to `reference` in outputs and in all gradients."""

from typing import TYPE_CHECKING, Literal

from torch import Tensor

from ..experts import Experts
from .backend import Backend
from .cpu import cpu
from .expert_parallel import expert_parallel
from .grouped import grouped
from .reference import reference
from .static import static
from .triton import triton

# From the definition to the most specialised.
BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (reference, grouped, static, cpu, triton, expert_parallel)
}


class Auto(Backend):
    """Delegates every call to the most specialised backend that pays off for it."""

    name = "auto"

    def chosen(self, x: Tensor, experts: Experts, rows: int | None) -> Backend:
        return next(backend for backend in reversed(BACKENDS.values()) if backend.pays(x, experts, rows))


auto = Auto()

# `expert_parallel` is not chosen by name: splitting a layer's experts wraps the layer's own backend in it.
BY_NAME = {backend.name: backend for backend in (auto, *BACKENDS.values()) if backend is not expert_parallel}

if TYPE_CHECKING:
    DispatchName = str
else:  # derived from the table, so that command lines offer every backend
    DispatchName = Literal[tuple(BY_NAME)]


def backend_named(name: str) -> Backend:
    """Return the backend of that name. Raises ValueError if there is none."""
    if name not in BY_NAME:
        raise ValueError(f"dispatch={name!r} is unknown; use one of {', '.join(BY_NAME)}")
    return BY_NAME[name]


__all__ = [
    "BACKENDS",
    "BY_NAME",
    "Backend",
    "DispatchName",
    "auto",
    "backend_named",
    "expert_parallel",
    "grouped",
    "reference",
    "static",
]

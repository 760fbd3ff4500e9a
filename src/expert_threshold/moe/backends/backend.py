"""The contract of a backend, which computes y_t = shared(x_t) + Σ_i z[t,i] · g[t,i] · expert_i(x_t)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ..experts import Experts, FeedForward


class Backend:
    """Computes the routed sum; equal to `reference` in outputs and in all gradients.

    A subclass has a name and `routed_sum`, and overrides `why_not` and `pays` to state its limits.
    """

    name: ClassVar[str]

    def why_not(self, x: Tensor, experts: Experts) -> str | None:
        """Return why this backend cannot compute rows like x (…, d_model), with the remedy; None if it can."""
        return None

    def pays(self, x: Tensor, experts: Experts, rows: int | None) -> bool:
        """Return True if `auto` should choose this backend; arguments as in `__call__`."""
        return False

    def chosen(self, x: Tensor, experts: Experts, rows: int | None) -> Backend:
        """Return the backend that computes such a call, itself unless it delegates; arguments as in `__call__`."""
        return self

    def fused_sum(
        self, x: Tensor, gates: Tensor, assignment: Tensor, experts: Experts, shared: FeedForward, rows: int | None
    ) -> Tensor | None:
        """Return the routed sum plus the shared experts' output if this backend computes both at once, else None."""
        return None

    def routed_sum(self, x: Tensor, gates: Tensor, assignment: Tensor, experts: Experts, rows: int | None) -> Tensor:
        """Return Σ_i z[t,i] · g[t,i] · expert_i(x_t), shaped like x; arguments as in `__call__`."""
        raise NotImplementedError

    def __call__(
        self,
        x: Tensor,
        gates: Tensor,
        assignment: Tensor,
        experts: Experts,
        shared: FeedForward | None = None,
        *,
        rows: int | None = None,
    ) -> Tensor:
        """Return the routed sum, plus the output of the shared experts if given; shaped like x.

        x: (tokens, d_model); gates: (tokens, experts) float32; assignment: (tokens, experts) bool. rows: a bound on the
        assigned token-expert pairs; None if only counting can tell. Raises ValueError if the backend cannot compute
        this.
        """
        backend = self.chosen(x, experts, rows)
        if shared is None:
            return backend.routed_sum(x, gates, assignment, experts, rows)
        y = backend.fused_sum(x, gates, assignment, experts, shared, rows)
        return backend.routed_sum(x, gates, assignment, experts, rows).add_(shared(x)) if y is None else y

    def require(self, x: Tensor, experts: Experts) -> None:
        """Raise ValueError if this backend cannot compute rows like x (…, d_model)."""
        if (why := self.why_not(x, experts)) is not None:
            raise ValueError(f"dispatch={self.name!r} {why}")

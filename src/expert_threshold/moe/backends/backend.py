"""The contract of a backend, a way to compute y_t = shared(x_t) + Σ_i z[t,i] · g[t,i] · expert_i(x_t)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ..experts import Experts, FeedForward


class Backend:
    """Computes the routed sum; equal to `reference` in outputs and in all gradients.

    A subclass has a name and `routed_sum`, and answers what it can do where that is not everything.
    """

    name: ClassVar[str]

    def why_not(self, x: Tensor, experts: Experts) -> str | None:
        """Return why this backend cannot compute rows like x (…, d_model), with the remedy; None where it can."""
        return None

    def pays(self, x: Tensor, experts: Experts, rows: int | None) -> bool:
        """Return True where `auto` should take this backend; arguments as of a call."""
        return False

    def routed_sum(self, x: Tensor, gates: Tensor, assignment: Tensor, experts: Experts, rows: int | None) -> Tensor:
        """Return Σ_i z[t,i] · g[t,i] · expert_i(x_t), shaped like x; arguments as of a call."""
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
        """Return the routed sum and, if given, what the shared experts make of every token; shaped like x.

        x: (tokens, d_model); gates: (tokens, experts) float32; assignment: (tokens, experts) bool. rows: at least as
        many as pairs of token and expert are assigned; None where that is not known without counting. Raises ValueError
        where the backend cannot compute this.
        """
        y = self.routed_sum(x, gates, assignment, experts, rows)
        return y if shared is None else y.add_(shared(x))

    def require(self, x: Tensor, experts: Experts) -> None:
        """Raise ValueError where this backend cannot compute rows like x (…, d_model)."""
        if (why := self.why_not(x, experts)) is not None:
            raise ValueError(f"dispatch={self.name!r} {why}")

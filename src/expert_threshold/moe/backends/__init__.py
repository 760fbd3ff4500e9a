"""Backends: different ways to compute y_t = shared(x_t) + Σ_i z[t,i] · g[t,i] · expert_i(x_t) (paper, Eq. 2)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ...install import install
from ...kernels.activation import ActivationName
from ...kernels.cpu import TILE, available, reason
from ...kernels.cpu.blocks import FEWEST_ROWS, OVERRIDES, override
from ..experts import Experts, FeedForward, plain, up_project
from .grouped import grouped_sum
from .static import is_native, static_sum

FEW = 16  # up to this many tokens, packing costs more than it saves
MEASURED_FROM = 4096  # with fewer tokens, no choice is worth the seconds that measuring takes
SAME = 0.03
"""The largest difference, relative to the norm of a tensor, between backends that round to bfloat16 a few times."""


class Backend:
    """A way to compute the routed sum, with the same outputs and gradients as `reference`.

    A subclass defines a name and `routed_sum`, and overrides `why_not` and `pays` to state its limits.
    """

    name: ClassVar[str]

    def why_not(self, x: Tensor, experts: Experts) -> str | None:
        """Return why this backend cannot compute rows like x (…, d_model), with a remedy, or None if it can."""
        return None

    def pays(self, x: Tensor, experts: Experts, rows: int | None) -> bool:
        """Return True if `auto` should choose this backend. Arguments are as in `__call__`."""
        return False

    def chosen(self, x: Tensor, experts: Experts, rows: int | None) -> Backend:
        """Return the backend that computes the call: this one, unless it delegates. Arguments are as in `__call__`."""
        return self

    def routed_sum(self, x: Tensor, gates: Tensor, assignment: Tensor, experts: Experts, rows: int | None) -> Tensor:
        """Return Σ_i z[t,i] · g[t,i] · expert_i(x_t), shaped like x. Arguments are as in `__call__`."""
        raise NotImplementedError

    def fused_sum(
        self, x: Tensor, gates: Tensor, assignment: Tensor, experts: Experts, shared: FeedForward, rows: int | None
    ) -> Tensor | None:
        """Return the routed sum plus the shared experts' output, or None if this backend does not compute both."""
        return None

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
        """Return the routed sum, plus the output of any shared experts, shaped like x.

        x: (tokens, d_model); gates: (tokens, experts) float32; assignment: (tokens, experts) bool. rows: an upper bound
        on the number of assigned pairs; None counts them. Raises ValueError if the backend cannot compute the call.
        """
        backend = self.chosen(x, experts, rows)
        backend.require(x, experts)
        if shared is not None and (y := backend.fused_sum(x, gates, assignment, experts, shared, rows)) is not None:
            return y
        y = backend.routed_sum(x, gates, assignment, experts, rows)
        return y if shared is None else y.add_(shared(x))

    def require(self, x: Tensor, experts: Experts) -> None:
        """Raise ValueError if this backend cannot compute rows like x (…, d_model)."""
        if (why := self.why_not(x, experts)) is not None:
            raise ValueError(f"dispatch={self.name!r} {why}")


class Reference(Backend):
    """The definition: experts are computed one after another, each on its own tokens only.

    Therefore, a NaN in the row of another token cannot reach the output of an expert.
    """

    name = "reference"

    def pays(self, x: Tensor, experts: Experts, rows: int | None) -> bool:
        return True

    def routed_sum(self, x: Tensor, gates: Tensor, assignment: Tensor, experts: Experts, rows: int | None) -> Tensor:
        ups, down = experts.ups(x.dtype), experts.down.to(x.dtype)
        tokens, outputs = assignment.T.nonzero()[:, 1], []
        for i, chosen in enumerate(tokens.split(assignment.sum(0).tolist())):
            if not len(chosen) and not torch.is_grad_enabled():  # in training, its weights need zero gradients
                continue
            h = up_project(x[chosen], tuple(up[i] for up in ups))
            a = h.relu().square() if len(ups) == 1 else F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1]
            outputs.append(((a @ down[i].T) * gates[chosen, i, None]).to(x.dtype))
        return torch.zeros_like(x).index_add(0, tokens, torch.cat(outputs)) if outputs else torch.zeros_like(x)


class Grouped(Backend):
    """Batches the products of neighbouring experts, which is fast on a CPU."""

    name = "grouped"
    routed_sum = staticmethod(grouped_sum)

    def pays(self, x: Tensor, experts: Experts, rows: int | None) -> bool:
        return len(x) > FEW or torch.is_grad_enabled() or torch.compiler.is_compiling()


class Static(Backend):
    """Multiplies segments of one buffer; `auto` chooses it if its products do not wait for the device.

    Without a bound on loads, it waits once, as `grouped` does, but launches one kernel per product instead of one per
    group of experts. `auto` does not choose it for unbounded loads in a compiled graph, which would need rows for every
    possible pair, nor for a few tokens, which use only few of the experts.
    """

    name = "static"
    routed_sum = staticmethod(static_sum)

    def pays(self, x: Tensor, experts: Experts, rows: int | None) -> bool:
        if rows is None and (torch.compiler.is_compiling() or len(x) <= FEW):
            return False
        return is_native(x, *experts.down.shape[1:])


class Cpu(Backend):
    """Calls the C++ kernels for this CPU, which also compute the shared experts in the same call if possible."""

    name = "cpu"

    def why_not(self, x: Tensor, experts: Experts) -> str | None:
        enough = x.new_empty(1).expand(FEWEST_ROWS, x.shape[-1])  # few rows go to another backend
        if self.pays(enough, experts, None):
            return None
        if not x.is_cpu:
            return "needs a CPU; use --device cpu, or dispatch='auto'"
        if not available():
            return f"has no kernels here: {reason()}; use dispatch='auto'"
        if x.dtype != torch.bfloat16:
            return f"computes in bfloat16, not in {x.dtype}; use dispatch='grouped'"
        if experts.activation.name != "relu2":
            return f"computes relu2, not {experts.activation.name}; use dispatch='grouped'"
        return f"needs widths that are multiples of {TILE}, and matrices that fit; use dispatch='grouped'"

    def pays(self, x: Tensor, experts: Experts, rows: int | None) -> bool:
        return override("routed_sum", x, experts.down.shape[2], experts.activation.name) is not None

    def chosen(self, x: Tensor, experts: Experts, rows: int | None) -> Backend:
        # If there are just too few rows for the kernels, use what `auto` would choose. Other obstacles are errors.
        few = not self.pays(x, experts, rows) and self.why_not(x, experts) is None
        return _most_specialised(x, experts, rows) if few else self

    def routed_sum(self, x: Tensor, gates: Tensor, assignment: Tensor, experts: Experts, rows: int | None) -> Tensor:
        y: Tensor = OVERRIDES["routed_sum"].kernel(x, gates, assignment, [experts.up, experts.down], rows)
        return y

    def fused_sum(
        self, x: Tensor, gates: Tensor, assignment: Tensor, experts: Experts, shared: FeedForward, rows: int | None
    ) -> Tensor | None:
        if not plain(shared, shared.up, shared.down):
            return None
        if override("feed_forward", x, len(shared.up.weight), experts.activation.name) is None:
            return None
        weights = [experts.up, experts.down, shared.up.weight[None], shared.down.weight[None]]
        y: Tensor = OVERRIDES["routed_sum"].kernel(x, gates, assignment, weights, rows)
        return y


class Triton(Backend):
    """Calls the Triton kernels in `kernels/gpu` (extra `triton`), imported on first use. The host never waits."""

    name = "triton"

    def why_not(self, x: Tensor, experts: Experts) -> str | None:
        try:
            from ...kernels.gpu.experts import DTYPES, INTERPRETED
        except ModuleNotFoundError as error:
            return f"needs {error.name}, which is missing; run: {install('triton')}"
        if not (x.is_cuda or INTERPRETED):
            return f"needs a CUDA GPU, not {x.device.type!r}; use dispatch='auto'"
        if x.dtype not in DTYPES:
            return f"computes in float32 or lower precision, not in {x.dtype}; use dispatch='grouped'"
        return None

    def routed_sum(self, x: Tensor, gates: Tensor, assignment: Tensor, experts: Experts, rows: int | None) -> Tensor:
        from ...kernels.gpu.experts import routed_sum

        return routed_sum(x, gates, assignment, experts.ups(x.dtype), experts.down.to(x.dtype), rows)


class Auto(Backend):
    """Delegates every call to the most specialised backend that pays off. In training on a GPU, it measures both that
    backend and `triton` and delegates to the faster one.
    """

    name = "auto"

    def chosen(self, x: Tensor, experts: Experts, rows: int | None) -> Backend:
        backend = _most_specialised(x, experts, rows)
        if not (x.is_cuda and torch.is_grad_enabled() and len(x) >= MEASURED_FROM):
            return backend
        names, (num_experts, d_model, d_expert) = (backend.name, "triton"), experts.down.shape
        shape = num_experts, d_model, d_expert
        return BACKENDS[fastest(names, x.device.index, x.dtype, shape, experts.activation.name)]


def _most_specialised(x: Tensor, experts: Experts, rows: int | None) -> Backend:
    return next(backend for backend in reversed(BACKENDS.values()) if backend.pays(x, experts, rows))


def fastest(
    names: tuple[str, ...], device: int, dtype: torch.dtype, shape: tuple[int, int, int], activation: ActivationName
) -> str:
    """Return the backend whose forward and backward are fastest for a layer of this shape (experts, d_model, d_expert)
    on this GPU, measured once per process. During the capture of a CUDA graph, return the first name.
    """
    if torch.cuda.is_current_stream_capturing():
        return names[0]
    with unset_fake_temporarily():
        return _measured(names, torch.device("cuda", device), dtype, shape, activation)


fastest._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler's decorator imports all of dynamo


@functools.cache
def _measured(
    names: tuple[str, ...],
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    activation: ActivationName,
    tokens: int = 2**14,
) -> str:
    """Time backends on random rows, with one expert per token. Exclude any that fails or differs from the first."""
    # Preserve the run's random state.
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device, torch.enable_grad():
        torch.manual_seed(0)
        experts = Experts(*shape, activation).to(dtype)
        for weight in experts.parameters():
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        x, upstream = torch.randn(2, tokens, shape[1]).to(dtype)
        assigned = torch.rand(tokens, shape[0]) < 1 / shape[0]
        gates = torch.rand(tokens, shape[0])
        leaves = [x.requires_grad_(), gates.requires_grad_(), *experts.parameters()]
        rows = tokens + tokens // 2  # the presets' bound

        def call(name: str) -> tuple[Tensor, ...]:
            y = BACKENDS[name](x, gates, assigned, experts, rows=rows)
            return y.detach(), *torch.autograd.grad(y, leaves, upstream)

        times: dict[str, float] = {}
        expected: tuple[Tensor, ...] | None = None
        for name in names:
            try:
                found = call(name)
                expected = found if expected is None else expected
                if all((a - b).norm() <= SAME * b.norm() for a, b in zip(found, expected, strict=True)):
                    times[name] = _milliseconds(functools.partial(call, name))
            except (RuntimeError, ValueError):  # Triton is absent, memory is short, a kernel does not compile
                continue
    return min(times, key=times.__getitem__, default=names[0])


def _milliseconds(call: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(call, return_mode="median"))


auto, reference = Auto(), Reference()
_ALL: tuple[Backend, ...] = (auto, reference, Grouped(), Static(), Cpu(), Triton())
BACKENDS = {backend.name: backend for backend in _ALL}
"""The backends by name, from the definition to the most specialised, after `auto`."""

if TYPE_CHECKING:
    DispatchName = str
else:  # derived from the table, so that command lines offer every backend
    DispatchName = Literal[tuple(BACKENDS)]

"""Muon: momentum orthogonalized by a Newton-Schulz iteration, for the model's matrices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ..kernels.cpu import muon as kernels

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
# Elements of a Newton-Schulz batch: enough to fill a GPU, few enough for a CPU's cache; larger temporaries would be
# read from memory for every product.
BATCH_ELEMENTS = {"cpu": 2**19, "gpu": 2**24}


def fast_dtype(device: torch.device) -> torch.dtype:
    """Returns bfloat16 if the hardware multiplies it, else float32.

    CUDA devices do from compute capability 8.0 (Ampere) on, ROCm devices always, and CPUs with AVX-512 BF16, which AMX
    implies.
    """
    if device.type == "cuda":
        fast = torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        fast = device.type == "cpu" and torch.cpu.get_capabilities().get("avx512_bf16", False)
    return torch.bfloat16 if fast else torch.float32


@torch.no_grad()
def newton_schulz(matrices: Tensor, steps: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    """Iterates X ← (a + b X Xᵀ + c (X Xᵀ)²) X `steps` times from X = M / ‖M‖: all singular values become about 1.

    matrices: (…, rows, columns), each normalised by its own Frobenius norm; a zero matrix stays zero. The products run
    in `dtype`, which is also the result's. Iteration and coefficients: Jordan et al., Muon (2024).
    """
    a, b, c = COEFFICIENTS
    rows, columns = matrices.shape[-2:]
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True).clamp_(min=EPS)
    x = torch.div(matrices, norm, out=torch.empty_like(matrices, dtype=dtype)).reshape(-1, rows, columns)
    # The polynomial multiplies from the smaller side: X (a + b XᵀX + …) is the same matrix.
    wide = rows <= columns
    gram = x.new_empty(len(x), min(rows, columns), min(rows, columns))
    polynomial, new = torch.empty_like(gram), torch.empty_like(x)
    for _ in range(steps):
        torch.bmm(*((x, x.mT) if wide else (x.mT, x)), out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        # a X is added outside the product: with a on the polynomial's diagonal, bfloat16's error would double.
        torch.baddbmm(x, *((polynomial, x) if wide else (x, polynomial)), beta=a, out=new)
        x, new = new, x
    return x.view(matrices.shape)


class _Piece(NamedTuple):
    """Some of a parameter's matrices with their gradients and momenta, each (matrices, rows, columns).

    All are views, except for gradients with other strides, which are copied.
    """

    weight: Tensor
    grad: Tensor
    momentum: Tensor


class Muon(Optimizer):
    """Steepest descent under the spectral norm, with Nesterov momentum; matrices of one shape are batched.

    params: each (…, out, in); leading dimensions stack matrices, such as experts'. Each matrix is updated as by
    `torch.optim.Muon` without weight decay, which accepts no stacks. ns_dtype: dtype of the Newton-Schulz products;
    None is `fast_dtype`. Raises ValueError for a vector.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_dtype: torch.dtype | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. Raises ValueError for an invalid option or a vector."""
        super().add_param_group(param_group)
        try:
            _require_movable(self.param_groups[-1])
        except ValueError:
            del self.param_groups[-1]
            raise

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Returns a parameter's state before its first step."""
        return {"momentum": torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates W ← W − lr · √max(1, out/in) · newton_schulz(Nesterov momentum) for each W with a gradient.

        closure: recomputes the loss and the gradients; its loss is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike: dict[object, list[_Piece]] = {}
            for weight in group["params"]:
                if weight.grad is not None and weight.numel():
                    kind = weight.shape[-2:], weight.dtype, weight.device
                    alike.setdefault(kind, []).append(self._piece(weight))
            for pieces in alike.values():
                _move(pieces, group)
        return loss

    def _piece(self, weight: Tensor) -> _Piece:
        """Returns the whole parameter as one piece.

        Raises RuntimeError for a stack that cannot be viewed as (matrices, rows, columns), since updates to a copy
        would be lost.
        """
        assert weight.grad is not None
        state = self.state[weight]
        if not state:
            state.update(self.initial_state(weight))
        shape = -1, *weight.shape[-2:]
        return _Piece(weight.view(shape), weight.grad.reshape(shape), state["momentum"].view(shape))


def _require_movable(group: Mapping[str, Any]) -> None:
    for option, holds, remedy in (
        ("lr", group["lr"] >= 0, "0 or more"),
        ("momentum", 0 <= group["momentum"] < 1, "a number from 0 to below 1"),
        ("ns_steps", group["ns_steps"] >= 1, "1 or more"),
    ):
        if not holds:
            raise ValueError(f"{option}={group[option]!r} is not possible: use {remedy}")
    for parameter, name in itertools.zip_longest(group["params"], group.get("param_names", ())):
        if parameter.ndim < 2:
            raise ValueError(
                f"parameter {f'{name} ' if name else ''}of shape {tuple(parameter.shape)} is not a matrix, and Muon "
                "updates only matrices (…, out, in): give it to another optimizer, such as AdamW"
            )


def _move(pieces: list[_Piece], group: Mapping[str, Any]) -> None:
    """Updates pieces of one matrix shape with the options of their parameter group."""
    rows, columns = pieces[0].weight.shape[-2:]
    momentum, ns_steps = group["momentum"], group["ns_steps"]
    ns_dtype = group["ns_dtype"] or fast_dtype(pieces[0].weight.device)
    rate = float(group["lr"]) * math.sqrt(max(1.0, rows / columns))
    native: list[_Piece] = []
    others: list[_Piece] = []
    for piece in pieces:
        by_kernel = group["nesterov"] and kernels.applies(piece.weight, piece.momentum, ns_dtype)
        (native if by_kernel else others).append(piece)
    if native:
        kernels.step(
            *zip(*native, strict=True),
            ns_steps=ns_steps,
            coefficients=COEFFICIENTS,
            eps=EPS,
            momentum=momentum,
            rate=rate,
        )
    for batch in _batches(others):
        sizes = [len(piece.weight) for piece in batch]
        directions = batch[0].grad.new_empty(sum(sizes), rows, columns)
        for piece, place in zip(batch, directions.split(sizes), strict=True):
            piece.momentum.lerp_(piece.grad, 1 - momentum)
            torch.lerp(piece.grad, piece.momentum, momentum if group["nesterov"] else 1.0, out=place)
        update = newton_schulz(directions, ns_steps, ns_dtype)
        for piece, part in zip(batch, update.split(sizes), strict=True):
            piece.weight.add_(part, alpha=-rate)


def _batches(wholes: list[_Piece]) -> Iterator[list[_Piece]]:
    """Yields batches of pieces of one matrix shape; a piece larger than a batch is split."""
    pieces: list[_Piece] = []
    for whole in wholes:
        pieces.extend(map(_Piece, *(stack.split(_batch_size(whole.weight)) for stack in whole)))
    batch: list[_Piece] = []
    for piece in sorted(pieces, key=lambda piece: len(piece.weight)):  # so that single matrices share a batch
        if batch and sum(len(other.weight) for other in [*batch, piece]) > _batch_size(piece.weight):
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch


def _batch_size(weight: Tensor) -> int:
    """Returns how many matrices of the weight's shape make a batch."""
    return max(1, BATCH_ELEMENTS["cpu" if weight.is_cpu else "gpu"] // weight.shape[-2:].numel())

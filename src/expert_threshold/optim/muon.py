"""Muon: momentum made orthogonal by a Newton-Schulz iteration, for the model's matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..native import muon as kernels

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
Moved = Callable[[Collection[str]], None]
# Elements of a Newton-Schulz batch: enough to fill a GPU; few enough to stay in a CPU's cache, because the temporaries
# of a larger one would come from memory again for every product.
BATCH_ELEMENTS = {"cpu": 2**19, "gpu": 2**24}


def fast_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware multiplies it, else float32.

    CUDA devices do from compute capability 8.0 on (Ampere), all of ROCm's do, and CPUs with AVX-512 BF16, so all with
    AMX too.
    """
    if device.type == "cuda":
        fast = torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        fast = device.type == "cpu" and torch.cpu.get_capabilities().get("avx512_bf16", False)
    return torch.bfloat16 if fast else torch.float32


@torch.no_grad()
def newton_schulz(matrices: Tensor, steps: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    """X ← (a + b X Xᵀ + c (X Xᵀ)²) X, `steps` times from X = M / ‖M‖: all singular values become about 1.

    matrices: (…, rows, columns), each normalised by its own Frobenius norm; a zero matrix stays zero. The products run
    in `dtype`, which is also the result's. Iteration and coefficients: Jordan et al., Muon (2024).
    """
    a, b, c = COEFFICIENTS
    rows, columns = matrices.shape[-2:]
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True).clamp_(min=EPS)
    x = torch.div(matrices, norm, out=torch.empty_like(matrices, dtype=dtype)).reshape(-1, rows, columns)
    # The polynomial acts from the smaller side: X (a + b XᵀX + …) is the same matrix.
    wide = rows <= columns
    gram = x.new_empty(len(x), min(rows, columns), min(rows, columns))
    polynomial, new = torch.empty_like(gram), torch.empty_like(x)
    for _ in range(steps):
        torch.bmm(*((x, x.mT) if wide else (x.mT, x)), out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        # a X stays outside the product: a + … on the polynomial's diagonal would double bfloat16's error.
        torch.baddbmm(x, *((polynomial, x) if wide else (x, polynomial)), beta=a, out=new)
        x, new = new, x
    return x.view(matrices.shape)


class _Piece(NamedTuple):
    """Some of a parameter's matrices, with their gradients and momenta; each (matrices, rows, columns); views, but for
    the gradients of other strides."""

    weight: Tensor
    grad: Tensor
    momentum: Tensor


class Muon:
    """Steepest descent under the spectral norm, with Nesterov momentum; matrices of one shape move in batches.

    parameters: by name, each (…, out, in); leading dimensions stack matrices, as of experts, each updated by itself.
    With constant momentum and learning rate every matrix moves as under `torch.optim.Muon` without weight decay.
    """

    def __init__(self, parameters: Mapping[str, Tensor], *, ns_steps: int, ns_dtype: torch.dtype) -> None:
        self.parameters = dict(parameters)
        self.momenta = {name: torch.zeros_like(parameter) for name, parameter in self.parameters.items()}
        self.ns_steps = ns_steps
        self.ns_dtype = ns_dtype

    @torch.no_grad()
    def step(self, learning_rate: float, momentum: float, moved: Moved = lambda names: None) -> None:
        """W ← W − learning_rate · √max(1, out/in) · newton_schulz(Nesterov momentum), where W has a gradient.

        moved: told the names of the parameters of one shape as soon as they have moved.
        """
        by_shape: dict[torch.Size, list[str]] = {}
        for name, weight in self.parameters.items():
            by_shape.setdefault(weight.shape[-2:], []).append(name)
        for names in by_shape.values():
            self._move(names, learning_rate, momentum)
            moved(names)

    def _move(self, names: list[str], learning_rate: float, momentum: float) -> None:
        rows, columns = self.parameters[names[0]].shape[-2:]
        rate = learning_rate * math.sqrt(max(1.0, rows / columns))
        native: list[_Piece] = []
        others: list[_Piece] = []
        for piece in self._pieces(names):
            (native if kernels.applies(piece.weight, piece.momentum, self.ns_dtype) else others).append(piece)
        if native:
            kernels.step(
                *zip(*native, strict=True),
                ns_steps=self.ns_steps,
                coefficients=COEFFICIENTS,
                eps=EPS,
                momentum=momentum,
                rate=rate,
            )
        for batch in _batches(others):
            sizes = [len(piece.weight) for piece in batch]
            nesterov = batch[0].grad.new_empty(sum(sizes), rows, columns)
            for piece, place in zip(batch, nesterov.split(sizes), strict=True):
                piece.momentum.lerp_(piece.grad, 1 - momentum)
                torch.lerp(piece.grad, piece.momentum, momentum, out=place)
            update = newton_schulz(nesterov, self.ns_steps, self.ns_dtype)
            for piece, part in zip(batch, update.split(sizes), strict=True):
                piece.weight.add_(part, alpha=-rate)

    def tensors(self) -> dict[str, Tensor]:
        """The state by flat name, not copied."""
        return {f"muon.{name}.momentum": tensor for name, tensor in self.momenta.items()}

    def _pieces(self, names: list[str]) -> list[_Piece]:
        """Those of these parameters, of one matrix shape, that have a gradient, whole.

        Raises RuntimeError for a stack of matrices that no stride leads through: a copy would move in vain.
        """
        pieces = []
        for name in names:
            weight, momentum = self.parameters[name], self.momenta[name]
            if weight.grad is not None and weight.numel():
                shape = -1, *weight.shape[-2:]
                pieces.append(_Piece(weight.view(shape), weight.grad.reshape(shape), momentum.view(shape)))
        return pieces


def _batches(wholes: list[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces of one matrix shape, cut and joined up to the batch's size."""
    pieces: list[_Piece] = []
    for whole in wholes:
        pieces.extend(map(_Piece, *(stack.split(_batch_size(whole.weight)) for stack in whole)))
    batch: list[_Piece] = []
    for piece in sorted(pieces, key=lambda piece: len(piece.weight)):  # single matrices fill a batch together
        if batch and sum(len(other.weight) for other in [*batch, piece]) > _batch_size(piece.weight):
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch


def _batch_size(weight: Tensor) -> int:
    """How many matrices of the weight's shape make a batch."""
    return max(1, BATCH_ELEMENTS["cpu" if weight.is_cpu else "gpu"] // weight.shape[-2:].numel())

"""Muon, which orthogonalizes the momentum of matrices with a Newton-Schulz iteration, and its later extensions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ..kernels.cpu.blocks import PARTS, override
from ..option import Count, Decay, NonNegative, NonNegativeInt, kinds_of, require_kind

OrthogonalizerName = Literal["newton_schulz", "polar_express"]
Lines = Literal["rows", "columns"]
Parts = Literal["rows", "columns", "matrix"]
Side = Literal["rows", "columns", "longer"]
Polynomial = tuple[float, float, float]  # a, b, c of a x + b x³ + c x⁵

COEFFICIENTS: Polynomial = (3.4445, -4.7750, 2.0315)
EPS = 1e-7  # the smallest norm to divide by
# The optimal polynomials for five steps, which move singular values between 0.001 and 1 to within 0.1411 of 1. They
# come from nanochat, where they were computed with a safety factor of 0.02 and a cushion of 2. Later steps repeat the
# last one. The factor on the norm keeps rounding from pushing singular values above 1.
POLAR_EXPRESS: tuple[Polynomial, ...] = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
POLAR_EXPRESS_SAFETY = 1.01
LEAST_SECOND_MOMENT = 1e-10

# Elements per batch in the iteration: enough to fill a GPU, but few enough to fit in a CPU's cache, since every product
# would have to read larger temporaries from memory.
BATCH_ELEMENTS = {"cpu": 2**19, "gpu": 2**24}


def fast_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 if the hardware can multiply it, otherwise float32.

    CUDA devices can from compute capability 8.0 (Ampere) on, ROCm devices always can, and CPUs can if they have
    AVX-512 BF16, which AMX implies.
    """
    if device.type == "cuda":
        fast = torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        fast = device.type == "cpu" and torch.cpu.get_capabilities().get("avx512_bf16", False)
    return torch.bfloat16 if fast else torch.float32


class _Piece(NamedTuple):
    """Some of a parameter's matrices with their gradients and momenta, each of shape (matrices, rows, columns).

    All are views, except that gradients with different strides are copied. second_moment: (matrices, rows, 1) or
    (matrices, 1, columns) with NorMuon, otherwise None.
    """

    weight: Tensor
    grad: Tensor
    momentum: Tensor
    second_moment: Tensor | None


class Muon(Optimizer):
    """Steepest descent under the spectral norm, with Nesterov momentum. Matrices of the same shape are batched.

    params: matrices (out, in), or stacks of matrices (experts, out, in). By default, each matrix is updated as by
    `torch.optim.Muon` without weight decay, which does not accept stacks. ns_dtype: dtype of the iteration's products;
    None uses `fast_dtype`. period: update a parameter group only every period-th step, at period times the learning
    rate; other steps only update its momenta. phase: the step within each period that updates it. turn: the number of
    the next step. The remaining options are described in `OptimConfig` and are off by default. Raises ValueError for a
    vector, a convolution with two or more spatial dimensions, or a parameter sharded over ranks.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: NonNegative = 0.02,
        momentum: Decay = 0.95,
        ns_steps: Count = 5,
        ns_dtype: torch.dtype | None = None,
        *,
        orthogonalizer: OrthogonalizerName = "newton_schulz",
        equilibrate: Lines | None = None,
        renormalize: Parts | None = None,
        normuon: Side | None = None,
        normuon_beta: Decay = 0.95,
        weight_decay: NonNegative = 0.0,
        cautious: bool = False,
        period: Count = 1,
        phase: NonNegativeInt = 0,
        turn: NonNegativeInt = 0,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "ns_steps": ns_steps, "ns_dtype": ns_dtype,
            "orthogonalizer": orthogonalizer, "equilibrate": equilibrate, "renormalize": renormalize,
            "normuon": normuon, "normuon_beta": normuon_beta, "weight_decay": weight_decay, "cautious": cautious,
            "period": period, "phase": phase, "turn": turn,
        }  # fmt: skip
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. Raises ValueError as `Muon` does."""
        super().add_param_group(param_group)
        try:
            _require_movable(self.param_groups[-1])
        except ValueError:
            del self.param_groups[-1]
            raise

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter before its first step."""
        state = {"momentum": torch.zeros_like(parameter)}
        side = next(group["normuon"] for group in self.param_groups if any(p is parameter for p in group["params"]))
        if side is not None:
            state["second_moment"] = parameter.new_zeros(second_moment_shape(parameter.shape, side))
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update W ← W − lr · √max(1, out/in) · orthogonalize(Nesterov momentum) for each W with a gradient.

        Weight decay first subtracts lr · weight_decay · W or, if cautious, only where the update has the same sign as
        W. Outside a group's turn, neither its weights nor its second moments change. closure: recomputes the gradients
        and returns the loss, which `step` then returns.
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
                    alike.setdefault(kind, []).append(self._piece(weight, group["normuon"] is not None))
            is_due = (group["turn"] - group["phase"]) % group["period"] == 0
            group["turn"] += 1
            for pieces in alike.values():
                if is_due:
                    _move(pieces, {**group, "lr": group["period"] * float(group["lr"])})
                else:
                    for piece in pieces:
                        piece.momentum.lerp_(piece.grad, 1 - group["momentum"])
        return loss

    def _piece(self, weight: Tensor, normuon: bool) -> _Piece:
        """Return a whole parameter as one piece. normuon: include its second moment."""
        assert weight.grad is not None
        state = self.state[weight]
        if not state:
            state.update(self.initial_state(weight))
        shape = -1, *weight.shape[-2:]
        second = state["second_moment"] if normuon else None
        return _Piece(
            weight.view(shape),
            weight.grad.reshape(shape),
            state["momentum"].view(shape),
            None if second is None else second.view(-1, *second.shape[-2:]),
        )


def _require_movable(group: Mapping[str, Any]) -> None:
    for option, kind in kinds_of(Muon.__init__).items():
        if option not in ("params", "ns_dtype", "return"):
            value = group[option]
            require_kind(option, value.item() if isinstance(value, Tensor) and value.numel() == 1 else value, kind)
    for parameter, name in itertools.zip_longest(group["params"], group.get("param_names", ())):
        wrong = None if parameter.ndim in (2, 3) else "is not a matrix or a stack of matrices"
        if hasattr(parameter, "device_mesh"):  # a DTensor
            wrong = "is sharded, as by fully_shard"
        if wrong is not None:
            raise ValueError(
                f"parameter {f'{name} ' if name else ''}of shape {tuple(parameter.shape)} {wrong}, but Muon only "
                "updates whole matrices (out, in) and stacks of matrices; use another optimizer, such as AdamW"
            )


def _move(pieces: list[_Piece], group: Mapping[str, Any]) -> None:
    """Update pieces with matrices of the same shape, using the options of their parameter group."""
    rows, columns = pieces[0].weight.shape[-2:]
    momentum, ns_steps = group["momentum"], group["ns_steps"]
    ns_dtype = group["ns_dtype"] or fast_dtype(pieces[0].weight.device)
    rate = float(group["lr"]) * math.sqrt(max(1.0, rows / columns))
    decay = float(group["lr"]) * group["weight_decay"]
    native: list[_Piece] = []
    others: list[_Piece] = []
    kernel = None
    for piece in pieces:
        state = [each for each in (piece.momentum, piece.second_moment) if each is not None]
        found = override("muon", piece.weight, state, ns_dtype)
        (others if found is None else native).append(piece)
        kernel = found or kernel
    if kernel is not None:
        weights, grads, momenta, moments = map(list, zip(*native, strict=True))
        second_moments = [moment for moment in moments if moment is not None]
        polynomials, safety = iteration(group["orthogonalizer"], ns_steps)
        kernel(
            weights, grads, momenta, second_moments, momentum, PARTS.index(group["equilibrate"]),
            list(itertools.chain(*polynomials)), safety, EPS, PARTS.index(group["renormalize"]),
            group["normuon_beta"], LEAST_SECOND_MOMENT, decay, group["cautious"], rate,
        )  # fmt: skip
        increment_version([*weights, *momenta, *second_moments])  # lets autograd detect that saved tensors are stale
    for batch in _batches(others):
        sizes = [len(piece.weight) for piece in batch]
        directions = batch[0].grad.new_empty(sum(sizes), rows, columns)
        for piece, place in zip(batch, directions.split(sizes), strict=True):
            piece.momentum.lerp_(piece.grad, 1 - momentum)
            torch.lerp(piece.grad, piece.momentum, momentum, out=place)
        if group["equilibrate"]:
            directions = normalize(directions, group["equilibrate"])
        update = orthogonalize(directions, group["orthogonalizer"], ns_steps, ns_dtype)
        if group["renormalize"]:
            update = normalize(update.to(directions.dtype), group["renormalize"])
        for piece, part in zip(batch, update.split(sizes), strict=True):
            if piece.second_moment is not None:
                part = normuon(part.to(directions.dtype), piece.second_moment, group["normuon_beta"])
            if decay:
                _decay(piece.weight, part, decay, group["cautious"])
            piece.weight.add_(part, alpha=-rate)


def _decay(weight: Tensor, update: Tensor, amount: float, cautious: bool) -> None:
    """Update W ← W − amount · W or, if cautious, only where U · W ≥ 0, i.e. where the update also moves W towards 0.

    Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019); Chen et al., Cautious Weight Decay (2025). As
    in `torch.optim.Muon`, the amount does not depend on the shape of W; nanochat multiplies it by √max(1, out/in).
    """
    if cautious:  # working in place and without a boolean is twice as fast on a CPU
        weight.sub_((update * weight).ge_(0).mul_(weight), alpha=amount)
    else:
        weight.sub_(weight, alpha=amount)


def _batches(wholes: list[_Piece]) -> Iterator[list[_Piece]]:
    """Yield batches of pieces, all with matrices of the same shape. Pieces larger than a batch are split."""
    pieces: list[_Piece] = []
    for whole in wholes:
        size = _batch_size(whole.weight)
        stacks = (itertools.repeat(None) if stack is None else stack.split(size) for stack in whole)
        pieces.extend(map(_Piece, *stacks))
    batch: list[_Piece] = []
    for piece in sorted(pieces, key=lambda piece: len(piece.weight)):  # so that single matrices share a batch
        if batch and sum(len(other.weight) for other in [*batch, piece]) > _batch_size(piece.weight):
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch


def _batch_size(weight: Tensor) -> int:
    """Return how many matrices with the shape of the weight fit in a batch."""
    return max(1, BATCH_ELEMENTS["cpu" if weight.is_cpu else "gpu"] // weight.shape[-2:].numel())


# The functions below turn the momentum, a stack of matrices (…, rows, columns), into the update. Muon applies them in
# this order: `normalize` for MuonEq's equilibration, `orthogonalize`, `normalize` for Muon+'s renormalisation,
# `normuon`. Only `orthogonalize` is always applied.


def iteration(name: OrthogonalizerName, steps: int) -> tuple[list[Polynomial], float]:
    """Return each step's polynomial, and the factor on the norm by which matrices are divided before the first step."""
    if name == "newton_schulz":
        return [COEFFICIENTS] * steps, 1.0
    return [POLAR_EXPRESS[min(step, len(POLAR_EXPRESS) - 1)] for step in range(steps)], POLAR_EXPRESS_SAFETY


@torch.no_grad()
def orthogonalize(
    matrices: Tensor, name: OrthogonalizerName = "newton_schulz", steps: int = 5, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return matrices with the same singular vectors and all singular values close to 1. A zero matrix stays zero.

    The iteration X ← (a + b X Xᵀ + c (X Xᵀ)²) X starts from X = M / ‖M‖, where ‖M‖ is the Frobenius norm of a matrix
    (…, rows, columns). newton_schulz: Jordan et al., Muon (2024). polar_express: Amsel et al., The Polar Express
    (2025), which starts from X = M / (1.01 ‖M‖). Each of its polynomials is optimal for the interval in which the
    previous one leaves the singular values, so small values grow faster and all end up closer to 1. dtype: the dtype
    of the products and of the result.
    """
    polynomials, safety = iteration(name, steps)
    rows, columns = matrices.shape[-2:]
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True).clamp_(min=EPS).mul_(safety)
    x = torch.div(matrices, norm, out=torch.empty_like(matrices, dtype=dtype)).reshape(-1, rows, columns)
    # The product is taken on the smaller side, since X (a + b XᵀX + …) is the same matrix.
    wide = rows <= columns
    gram = x.new_empty(len(x), min(rows, columns), min(rows, columns))
    polynomial, new = torch.empty_like(gram), torch.empty_like(x)
    for a, b, c in polynomials:
        torch.bmm(*((x, x.mT) if wide else (x.mT, x)), out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        # a X is added outside of the product; with a on the polynomial's diagonal, bfloat16's error would double.
        torch.baddbmm(x, *((polynomial, x) if wide else (x, polynomial)), beta=a, out=new)
        x, new = new, x
    return x.view(matrices.shape)


def normalize(matrices: Tensor, parts: Parts) -> Tensor:
    """Return M with equal row norms, M_i √(min(m, n) / m) / ‖M_i‖, or equal column norms, or M √min(m, n) / ‖M‖.

    Every matrix (m, n) thus gets √min(m, n), the Frobenius norm of an orthogonal matrix; zeros stay zero. Before the
    iteration, this is the equilibration in Chang et al., MuonEq (2026). After it, this is the renormalisation in Zhang
    et al., Muon+ (2026), who give rows or columns a norm of 1; nanochat renormalises the whole matrix.
    """
    dim = {"rows": -1, "columns": -2, "matrix": (-2, -1)}[parts]
    norm: Tensor = torch.linalg.vector_norm(matrices, dim=dim, keepdim=True).clamp_(min=EPS)
    count = norm.shape[-2] * norm.shape[-1]
    return matrices * (math.sqrt(min(matrices.shape[-2:]) / count) / norm)


def second_moment_shape(matrices: torch.Size, side: Side) -> tuple[int, ...]:
    """Return the shape of NorMuon's second moments: one for each row, for each column, or along the longer side."""
    *stack, rows, columns = matrices
    by_row = side == "rows" or (side == "longer" and rows >= columns)
    return (*stack, rows, 1) if by_row else (*stack, 1, columns)


@torch.no_grad()
def normuon(update: Tensor, second_moment: Tensor, beta: float) -> Tensor:
    """Update v ← β v + (1 − β) mean(U²) over each row or column, and return U / √v scaled to the norm of U.

    Rows that recently moved more than others thus move less. second_moment: v, with the shape returned by
    `second_moment_shape`, updated in place. Li et al., NorMuon (2025), use rows and scale to a root mean square of 0.2;
    keeping the norm and using the longer side follow nanochat.
    """
    mean = update.square().sum_to_size(second_moment.shape) / (update.numel() // second_moment.numel())
    second_moment.lerp_(mean, 1 - beta)
    scale = second_moment.clamp(min=LEAST_SECOND_MOMENT).rsqrt()
    before, after = (squares.sum((-2, -1), keepdim=True) for squares in (mean, mean * scale.square()))
    return update * (scale * (before / after.clamp(min=LEAST_SECOND_MOMENT)).sqrt())

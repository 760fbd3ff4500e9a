"""Muon: momentum orthogonalized by a Newton-Schulz iteration, for the model's matrices, with later additions to it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ..kernels.cpu.blocks import PARTS, override
from ..option import Count, Decay, NonNegative, NonNegativeInt, require_kind
from . import orthogonal
from .orthogonal import Lines, OrthogonalizerName, Parts, Side, normalize, normuon, orthogonalize, second_moment_shape

# Elements of a batch of the iteration: enough to fill a GPU, few enough for a CPU's cache; larger temporaries would be
# read from memory for every product.
BATCH_ELEMENTS = {"cpu": 2**19, "gpu": 2**24}


def fast_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 if the hardware multiplies it, else float32.

    CUDA devices do from compute capability 8.0 (Ampere) on, ROCm devices always, and CPUs with AVX-512 BF16, which AMX
    implies.
    """
    if device.type == "cuda":
        fast = torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        fast = device.type == "cpu" and torch.cpu.get_capabilities().get("avx512_bf16", False)
    return torch.bfloat16 if fast else torch.float32


class _Piece(NamedTuple):
    """Some of a parameter's matrices with their gradients and momenta, each (matrices, rows, columns).

    All are views, except for gradients with other strides, which are copied. second_moment: of NorMuon, (matrices,
    rows, 1) or (matrices, 1, columns); None without it.
    """

    weight: Tensor
    grad: Tensor
    momentum: Tensor
    second_moment: Tensor | None


class Muon(Optimizer):
    """Steepest descent under the spectral norm, with Nesterov momentum; matrices of one shape are batched.

    params: matrices (out, in), or stacks of them (experts, out, in). By default each matrix is updated as
    by `torch.optim.Muon` without weight decay, which accepts no stacks. ns_dtype: dtype of the iteration's products;
    None is `fast_dtype`. period: a parameter group is updated only in every period-th step, number `phase` of each
    period, at period times the learning rate; in the other steps only its momenta are. turn: the number of the next
    step. The remaining options are those of `OptimConfig` and off by default. Raises ValueError for a vector, a
    convolution of two dimensions or more, and a parameter sharded over ranks.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_dtype: torch.dtype | None = None,
        *,
        orthogonalizer: OrthogonalizerName = "newton_schulz",
        equilibrate: Lines | None = None,
        renormalize: Parts | None = None,
        normuon: Side | None = None,
        normuon_beta: float = 0.95,
        weight_decay: float = 0.0,
        cautious: bool = False,
        period: int = 1,
        phase: int = 0,
        turn: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "orthogonalizer": orthogonalizer,
            "equilibrate": equilibrate,
            "renormalize": renormalize,
            "normuon": normuon,
            "normuon_beta": normuon_beta,
            "weight_decay": weight_decay,
            "cautious": cautious,
            "period": period,
            "phase": phase,
            "turn": turn,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. Raises ValueError as `Muon` does."""
        super().add_param_group(param_group)
        try:
            _require_movable(self.param_groups[-1])
        except ValueError:
            del self.param_groups[-1]
            raise

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return a parameter's state before its first step."""
        state = {"momentum": torch.zeros_like(parameter)}
        side = next(group["normuon"] for group in self.param_groups if any(p is parameter for p in group["params"]))
        if side is not None:
            state["second_moment"] = parameter.new_zeros(second_moment_shape(parameter.shape, side))
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update W ← W − lr · √max(1, out/in) · orthogonalize(Nesterov momentum) for each W with a gradient.

        Weight decay first subtracts lr · weight_decay · W, or, if cautious, this only where the update has the sign of
        W. Between the steps of its period a group keeps W and its second moments. closure: recomputes the loss and the
        gradients; its loss is returned.
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
        """Return the whole parameter as one piece. normuon: its second moment is used."""
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
    kinds = {
        "lr": NonNegative,
        "momentum": Decay,
        "ns_steps": Count,
        "normuon_beta": Decay,
        "period": Count,
        "phase": NonNegativeInt,
        "turn": NonNegativeInt,
        "weight_decay": NonNegative,
        "orthogonalizer": OrthogonalizerName,
        "equilibrate": Lines | None,
        "renormalize": Parts | None,
        "normuon": Side | None,
    }
    for option, kind in kinds.items():
        value = group[option]
        require_kind(option, value.item() if isinstance(value, Tensor) and value.numel() == 1 else value, kind)
    for parameter, name in itertools.zip_longest(group["params"], group.get("param_names", ())):
        wrong = None if parameter.ndim in (2, 3) else "is no matrix or stack of matrices"
        if hasattr(parameter, "device_mesh"):  # a DTensor
            wrong = "is sharded, as by fully_shard"
        if wrong is not None:
            raise ValueError(
                f"parameter {f'{name} ' if name else ''}of shape {tuple(parameter.shape)} {wrong}, and Muon updates "
                "only whole matrices (out, in) and stacks of them: give it to another optimizer, such as AdamW"
            )


def _move(pieces: list[_Piece], group: Mapping[str, Any]) -> None:
    """Update pieces of one matrix shape with the options of their parameter group."""
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
        found = override("muon", piece.weight, state, ns_dtype) if group["nesterov"] else None
        (others if found is None else native).append(piece)
        kernel = found or kernel
    if kernel is not None:
        weights, grads, momenta, moments = map(list, zip(*native, strict=True))
        second_moments = [moment for moment in moments if moment is not None]
        polynomials, safety = orthogonal.iteration(group["orthogonalizer"], ns_steps)
        kernel(
            weights,
            grads,
            momenta,
            second_moments,
            momentum,
            PARTS.index(group["equilibrate"]),
            [number for polynomial in polynomials for number in polynomial],
            safety,
            orthogonal.EPS,
            PARTS.index(group["renormalize"]),
            group["normuon_beta"],
            orthogonal.LEAST_SECOND_MOMENT,
            decay,
            group["cautious"],
            rate,
        )
        increment_version([*weights, *momenta, *second_moments])  # tells autograd that what it saved of them is stale
    for batch in _batches(others):
        sizes = [len(piece.weight) for piece in batch]
        directions = batch[0].grad.new_empty(sum(sizes), rows, columns)
        for piece, place in zip(batch, directions.split(sizes), strict=True):
            piece.momentum.lerp_(piece.grad, 1 - momentum)
            torch.lerp(piece.grad, piece.momentum, momentum if group["nesterov"] else 1.0, out=place)
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
    """Update W ← W − amount · W, or, if cautious, only where U · W ≥ 0: where the update too goes towards 0.

    Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019); Chen et al., Cautious Weight Decay (2025). The
    amount does not depend on the matrix's shape, as in `torch.optim.Muon`; in nanochat it has Muon's √max(1, out/in).
    """
    if cautious:  # in place and without a boolean: twice as fast on a CPU
        weight.sub_((update * weight).ge_(0).mul_(weight), alpha=amount)
    else:
        weight.sub_(weight, alpha=amount)


def _batches(wholes: list[_Piece]) -> Iterator[list[_Piece]]:
    """Yields batches of pieces of one matrix shape; a piece larger than a batch is split."""
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
    """Return how many matrices of the weight's shape make a batch."""
    return max(1, BATCH_ELEMENTS["cpu" if weight.is_cpu else "gpu"] // weight.shape[-2:].numel())

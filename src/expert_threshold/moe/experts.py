"""The feed-forward and the stacked weights of many of them. All weights are (…, out, in)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ActivationName = Literal["relu2", "swiglu"]


class Activation(NamedTuple):
    """A nonlinearity on pre-activations h (rows, width · d_expert), and its derivative, both without autograd.

    forward(h) returns (kept, a): what backward needs, which may be h overwritten, and the activation.
    backward(kept, da) returns (a, dh): the activation again and the gradient of h; it may overwrite `da`, never `kept`.
    """

    width: int  # matrices before the nonlinearity: 1, or 2 where one gates the other
    forward: Callable[[Tensor], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _relu2(h: Tensor) -> tuple[Tensor, Tensor]:
    r = h.relu_()
    return r, r * r


def _relu2_backward(r: Tensor, da: Tensor) -> tuple[Tensor, Tensor]:
    return r * r, da.mul_(r).mul_(2)


def _swiglu(h: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = h.chunk(2, -1)
    return h, F.silu(gate).mul_(up)


def _swiglu_backward(h: Tensor, da: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = h.chunk(2, -1)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    dgate = da * up * (sigmoid + silu * (1 - sigmoid))
    return silu * up, torch.cat((dgate, da * silu), -1)


ACTIVATIONS: dict[str, Activation] = {
    "relu2": Activation(1, _relu2, _relu2_backward),
    "swiglu": Activation(2, _swiglu, _swiglu_backward),
}


def activation_named(name: str) -> Activation:
    """The activation of that name. Raises ValueError if there is none."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation={name!r} is unknown; use one of {', '.join(get_args(ActivationName))}")
    return ACTIVATIONS[name]


def refuse_second_derivative() -> None:
    """To be called in a hand-written backward: raises RuntimeError under create_graph=True, where it would be wrong."""
    if torch.is_grad_enabled():
        raise RuntimeError("this layer has no second derivative; call backward without create_graph=True")


def up_project(x: Tensor, matrices: tuple[Tensor, ...]) -> Tensor:
    """Pre-activations (rows, width · d_expert) of x (rows, d_model), the matrices' outputs side by side."""
    if len(matrices) == 1:
        return x @ matrices[0].T
    return torch.cat([x @ m.T for m in matrices], -1)


class _FeedForwardFunction(torch.autograd.Function):
    """down · act(up · x), in blocks of rows; keeps only the input and the pre-activations for backward."""

    @staticmethod
    def blocks(x: Tensor) -> tuple[Tensor, ...]:
        """Rows in blocks whose intermediates stay in cache; at most 16, as weight gradients are rounded after each."""
        blocks: tuple[Tensor, ...] = x.split(max(1024, -(-len(x) // 16)))
        return blocks

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: Activation, down: Tensor, *ups: Tensor) -> Tensor:
        y = torch.empty(len(x), len(down), dtype=x.dtype, device=x.device)
        blocks = _FeedForwardFunction.blocks
        kept = []
        for rows, out in zip(blocks(x), blocks(y), strict=True):
            keep, a = activation.forward(up_project(rows, ups))
            torch.mm(a, down.T, out=out)
            kept.append(keep)
        ctx.activation = activation
        ctx.save_for_backward(x, down, *ups, *kept)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        x, down, *rest = ctx.saved_tensors
        width, activation = ctx.activation.width, ctx.activation
        ups, kept = rest[:width], rest[width:]
        dx, ddown = torch.empty_like(x), torch.zeros_like(down)
        dups = [torch.zeros_like(up) for up in ups]
        blocks = _FeedForwardFunction.blocks
        for xs, dys, dxs, keep in zip(blocks(x), blocks(dy), blocks(dx), kept, strict=True):
            a, dh = activation.backward(keep, dys @ down)
            ddown.addmm_(dys.T, a)
            parts = dh.chunk(width, -1)
            torch.mm(parts[0], ups[0], out=dxs)
            if width == 2:
                dxs.addmm_(parts[1], ups[1])
            for dup, part in zip(dups, parts, strict=True):
                dup.addmm_(part.T, xs)
        return dx, None, ddown, *dups


class Linear(nn.Linear):
    """Without bias; runs in the dtype of its input, to which the float32 master weight is cast."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__(d_in, d_out, bias=False)

    def reset_parameters(self) -> None:
        """PyTorch's own default; nothing on meta, where it would load much of torch in vain."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class FeedForward(nn.Module):
    """down · relu(up · x)², or down · (silu(gate · x) · (up · x)); without biases.

    Runs in the dtype of its input; weights are cast to it.
    """

    def __init__(self, d_model: int, d_hidden: int, activation: ActivationName = "relu2") -> None:
        super().__init__()
        self.activation = activation_named(activation)
        self.up = Linear(d_model, d_hidden)
        self.gate = Linear(d_model, d_hidden) if self.activation.width == 2 else None
        self.down = Linear(d_hidden, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """(…, d_model) to (…, d_model)."""
        linears = (self.up,) if self.gate is None else (self.gate, self.up)
        ups = [linear.weight.to(x.dtype) for linear in linears]
        flat = x.reshape(-1, x.shape[-1])
        y: Tensor = _FeedForwardFunction.apply(flat, self.activation, self.down.weight.to(x.dtype), *ups)
        return y.view(x.shape)


class Experts(nn.Module):
    """The weights of num_experts feed-forwards, stacked: up and gate (experts, d_expert, d_model), down its mirror."""

    def __init__(self, num_experts: int, d_model: int, d_expert: int, activation: ActivationName = "relu2") -> None:
        super().__init__()
        self.activation = activation_named(activation)
        self.up = nn.Parameter(torch.empty(num_experts, d_expert, d_model))
        self.gate = nn.Parameter(torch.empty_like(self.up)) if self.activation.width == 2 else None
        self.down = nn.Parameter(torch.empty(num_experts, d_model, d_expert))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """PyTorch's own default per expert; `GPT.init_weights` applies the paper's."""
        for weight in (weight for weight in self.parameters() if not weight.is_meta):
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def ups(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The matrices before the nonlinearity, in `dtype`."""
        weights = (self.up,) if self.gate is None else (self.gate, self.up)
        return tuple(weight.to(dtype) for weight in weights)

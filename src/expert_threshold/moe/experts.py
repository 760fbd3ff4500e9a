"""The feed-forward layer and the stacked weights of many experts. All weights are (…, out, in)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import apply, as_autocast, no_autocast, refuse_second_derivative
from ..kernels.activation import Activation, ActivationName, activation_named
from ..kernels.cpu.blocks import override


def up_project(x: Tensor, matrices: tuple[Tensor, ...], out: Tensor | None = None) -> Tensor:
    """Return the concatenated pre-activations (…, rows, width · d_expert) for x (…, rows, d_model)."""
    if len(matrices) == 1:
        return torch.matmul(x, matrices[0].mT, out=out)
    return torch.cat([x @ m.mT for m in matrices], -1, out=out)


# Hidden activations in a block: few enough to stay in a CPU's cache, but enough for efficient products. CPUs with
# bfloat16 tiles need larger blocks (docs/log/training.md).
HIDDEN_PER_BLOCK = 2**22 if torch.cpu._is_amx_tile_supported() else 2**20


class _FeedForwardFunction(torch.autograd.Function):
    """down · act(up · x), in blocks of rows; keeps only the input and the pre-activations for backward."""

    @staticmethod
    def blocks(x: Tensor, hidden: int) -> tuple[Tensor, ...]:
        """Split x into at most 16 blocks whose intermediates stay in cache. Each block rounds the weight gradients.

        On a GPU, all rows form one block.
        """
        if not x.is_cpu:
            return (x,)
        rows = max(HIDDEN_PER_BLOCK // hidden, -(-len(x) // 16), 1)
        blocks: tuple[Tensor, ...] = x.split(rows) if len(x) > rows else (x,)
        return blocks

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: Activation, down: Tensor, *ups: Tensor) -> Tensor:
        y = torch.empty(len(x), len(down), dtype=x.dtype, device=x.device)
        blocks, hidden = _FeedForwardFunction.blocks, down.shape[1]
        kept = []
        for rows, out in zip(blocks(x, hidden), blocks(y, hidden), strict=True):
            kept.append(activation.keep(up_project(rows, ups)))
            torch.mm(activation.value(kept[-1]), down.T, out=out)
        ctx.activation = activation
        ctx.save_for_backward(x, down, *ups, *kept)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        x, down, *rest = ctx.saved_tensors
        width, activation = ctx.activation.width, ctx.activation
        ups, kept = rest[:width], rest[width:]
        scaled_ups = [up * activation.scale for up in ups]
        dx, ddown = torch.empty_like(x), torch.zeros_like(down)
        dups = [torch.zeros_like(up) for up in ups]
        blocks, hidden = _FeedForwardFunction.blocks, down.shape[1]
        for xs, dys, dxs, keep in zip(blocks(x, hidden), blocks(dy, hidden), blocks(dx, hidden), kept, strict=True):
            ddown.addmm_(dys.T, activation.value(keep))
            parts = activation.slope(keep, dys @ down).chunk(width, -1)
            torch.mm(parts[0], scaled_ups[0], out=dxs)
            if width == 2:
                dxs.addmm_(parts[1], scaled_ups[1])
            for dup, part in zip(dups, parts, strict=True):
                dup.addmm_(part.T, xs)
        return dx, None, ddown, *(dup.mul_(activation.scale) for dup in dups)


class Linear(nn.Linear):
    """A linear layer without bias, which casts its float32 master weight to the dtype of the input."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__(d_in, d_out, bias=False)

    def reset_parameters(self) -> None:
        """Apply PyTorch's initialisation, except on the meta device, where it would only import much of torch."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def hooked(module: nn.Module, *, except_by: type | None = None) -> bool:
    """Return True if an override, or hooks of classes other than `except_by`, may make a call differ from `forward`."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    others = (hook for of in hooks for hook in of.values() if not isinstance(hook, except_by or ()))
    return "forward" in module.__dict__ or next(others, None) is not None


def plain(*modules: nn.Module) -> bool:
    """Return True if the modules are of our own classes and have no hooks, so that their weights may be used directly.

    Adapters replace a module, its class or its `forward`, and a kernel that read the weights would bypass them.
    """
    return all(type(module) in (Linear, FeedForward) and not hooked(module) for module in modules)


class FeedForward(nn.Module):
    """down · relu(up · x)², or down · (silu(gate · x) · (up · x)); without biases.

    Weights are cast to the dtype of the input.
    """

    def __init__(self, d_model: int, d_hidden: int, activation: ActivationName = "relu2") -> None:
        super().__init__()
        self.activation = activation_named(activation)
        self.up = Linear(d_model, d_hidden)
        self.gate = Linear(d_model, d_hidden) if self.activation.width == 2 else None
        self.down = Linear(d_hidden, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for x (…, d_model), with its shape and dtype, or with autocast's dtype under autocast."""
        x = as_autocast(x)
        with no_autocast(x):
            return self._map(x)

    def _map(self, x: Tensor) -> Tensor:
        linears = (self.up,) if self.gate is None else (self.gate, self.up)
        is_plain = plain(*linears, self.down)
        kernel = override("feed_forward", x, len(self.up.weight), self.activation.name) if is_plain else None
        if kernel is None and (not is_plain or torch.compiler.is_compiling()):  # the compiler fuses plain operations
            hidden = [linear(x) for linear in linears]
            mapped: Tensor = self.down(hidden[0].relu().square() if len(hidden) == 1 else F.silu(hidden[0]) * hidden[1])
            return mapped
        flat, down = x.reshape(-1, x.shape[-1]), self.down.weight.to(x.dtype)
        ups = [linear.weight.to(x.dtype) for linear in linears]
        if kernel is None:
            rows = apply(_FeedForwardFunction, flat, self.activation, down, *ups)
        else:
            rows = kernel(flat, ups[0], down)
        y: Tensor = torch.ops.aten._unsafe_view(rows, x.shape)  # a view could not be modified in place under FSDP2
        return y


class Experts(nn.Module):
    """The stacked weights of feed-forwards: up and gate are (experts, d_expert, d_model), down is transposed."""

    def __init__(self, num_experts: int, d_model: int, d_expert: int, activation: ActivationName = "relu2") -> None:
        super().__init__()
        self.activation = activation_named(activation)
        self.up = nn.Parameter(torch.empty(num_experts, d_expert, d_model))
        self.gate = nn.Parameter(torch.empty_like(self.up)) if self.activation.width == 2 else None
        self.down = nn.Parameter(torch.empty(num_experts, d_model, d_expert))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Apply PyTorch's initialisation to each expert. `GPT.init_weights` applies the paper's initialisation."""
        for weight in (weight for weight in self.parameters() if not weight.is_meta):
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def ups(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the matrices before the nonlinearity, in `dtype`."""
        weights = (self.up,) if self.gate is None else (self.gate, self.up)
        return tuple(weight.to(dtype) for weight in weights)

"""The live bytes of a step, counted while it runs on tensors without data, so in seconds whatever its size."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from ..kernels.scratch import scratch_bytes


class Memory(NamedTuple):
    """Bytes at one moment.

    dispatch: made by layers with experts in the forward, but for the shared ones; logits: made by the loss; casts: made
    of weights alone; gradients: of weights; activations: all else.
    """

    activations: int = 0
    dispatch: int = 0
    logits: int = 0
    casts: int = 0
    gradients: int = 0

    @property
    def total(self) -> int:
        return sum(self)


class _Made:
    """A storage's kind and bytes."""

    def __init__(self, kind: str, size: int) -> None:
        self.kind, self.size = kind, size


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators make, from then until they are freed, and operators' scratch.

    weights: those of this module do not count, their gradients do. kinds: fields of `Memory` for what is made in the
    forward of a module, the innermost in this table, or by an operator, by its name. moments: one for each operator.
    """

    def __init__(self, weights: nn.Module, kinds: Mapping[nn.Module | str, str]) -> None:
        super().__init__()
        self.moments: list[Memory] = []
        self._kinds = kinds
        self._within = ["activations"]
        self._bytes = dict.fromkeys((*Memory._fields, "weights"), 0)
        self._made: WeakIdKeyDictionary = WeakIdKeyDictionary()
        for tensor in (*weights.parameters(), *weights.buffers()):
            self._hold(tensor, "weights")
        for parameter in weights.parameters():
            if parameter.grad is not None:
                self._hold(parameter.grad, "gradients")
        self._parameters = list(weights.parameters())

    def __enter__(self) -> LiveBytes:
        super().__enter__()
        self._hooks = ExitStack()
        self._hooks.enter_context(register_module_forward_pre_hook(self._enter_module))
        self._hooks.enter_context(register_module_forward_hook(self._leave_module, always_call=True))
        for parameter in self._parameters:
            self._hooks.enter_context(parameter.register_post_accumulate_grad_hook(self._become_gradient))
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.close()
        super().__exit__(*error)

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        self._within.append(self._kinds.get(module, self._within[-1]))

    def _leave_module(self, *_: Any) -> None:
        self._within.pop()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        name = operator.name()
        kind = self._kinds.get(name) or ("casts" if self._are_weights(args) else self._within[-1])
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._hold(tensor, kind)
        now = self._bytes | {kind: self._bytes[kind] + scratch_bytes(name, *args, **kwargs)}
        self.moments.append(Memory(**{kind: now[kind] for kind in Memory._fields}))
        return result

    def _are_weights(self, args: Any) -> bool:
        """Return True if all of these are weights, or made of weights alone."""
        storages = [leaf.untyped_storage() for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        made = [self._made.get(storage) for storage in storages]
        return bool(made) and all(part is not None and part.kind in ("weights", "casts") for part in made)

    def _hold(self, tensor: Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._made:
            made = self._made[storage] = _Made(kind, storage.nbytes())
            self._bytes[kind] += made.size
            weakref.finalize(storage, self._free, made)

    def _free(self, made: _Made) -> None:
        self._bytes[made.kind] -= made.size

    def _become_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        made = self._made[parameter.grad.untyped_storage()]
        self._bytes[made.kind] -= made.size
        made.kind = "gradients"
        self._bytes[made.kind] += made.size

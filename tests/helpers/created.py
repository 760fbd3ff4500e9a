"""Records what operations make, on tensors with data and on those that stand for a GPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


class Created(TorchDispatchMode):
    """Records the dtype and the number of elements of every tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[tuple[torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        values = result if isinstance(result, tuple | list) else (result,)
        self.tensors += [(value.dtype, value.numel()) for value in values if isinstance(value, Tensor)]
        return result


def created_by(work: Callable[[], Any]) -> list[tuple[torch.dtype, int]]:
    with Created() as mode:
        work()
    return mode.tensors


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Tensors on "cuda" have no data, but shapes, dtypes and the operations of a Hopper GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    with FakeTensorMode(), torch.no_grad():
        yield

"""The setting of a stage: the device, the sizes of this run, and its deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

Row = dict[str, Any]


class Case(NamedTuple):
    """One thing to measure or to check. run() returns its row and raises whatever goes wrong.

    seconds: about how long it takes on a GPU; a case is not begun with less time than that left.
    """

    name: str
    run: Callable[[], Row]
    seconds: float = 5.0


class NotRunError(Exception):
    """A case cannot run here; the message says why, in one line."""


class OutOfTimeError(Exception):
    """A case was stopped by its time and goes on in the next run; the message says where it stands."""


class Setting(NamedTuple):
    """One stage's orders. deadline: on the clock of `time.monotonic`, which all processes of a machine share."""

    out: Path
    dry: bool  # toy sizes
    cuda: bool  # False on the CPU
    data: str  # the text to train on, as `et train --data` takes it
    deadline: float = float("inf")

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self.cuda else "cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype of everything that is timed."""
        return torch.bfloat16

    @property
    def left(self) -> float:
        """Seconds until this stage's time is up."""
        return self.deadline - time.monotonic()

    def pick(self, on_gpu: Any, dry: Any) -> Any:
        """Return the size for a GPU or the toy one."""
        return dry if self.dry else on_gpu

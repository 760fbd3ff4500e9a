"""The table of stages, in the order of what is worth most."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from .setting import Case, Row, Setting


class Stage(Protocol):
    """A module of this package that measures one thing.

    FIELDS: what every measured case's row has. `lines` tells the stage on the summary's screen.
    """

    FIELDS: tuple[str, ...]

    def cases(self, setting: Setting) -> Iterable[Case]:
        """Yield the cases in the order of what is worth most."""

    def lines(self, rows: dict[str, Row]) -> list[str]:
        """Return a few lines about the measured cases."""


class Entry(NamedTuple):
    """share: of the time, beside the other stages that are still to run. says: what the stage tells, in one line."""

    share: float
    says: str
    interpreted: bool = True  # in a dry run Triton's kernels run in its interpreter


STAGES = {
    "ceilings": Entry(0.3, "what the card can do: bfloat16 products, a copy, a read"),
    "correctness": Entry(2.0, "every rule and backend against float64, graphs, compiling, decoding, resuming"),
    "layer": Entry(2.2, "the layer of experts beside dense, plain PyTorch and peers; tiles are tuned"),
    "parts": Entry(0.6, "selection, rules, cross-entropy, Muon and attention beside their floors"),
    "step": Entry(1.6, "a whole step of d12 and d20: tokens/s and MFU, eager, compiled, captured"),
    "training": Entry(2.0, "small runs of every method with the same seeds"),
    "decoding": Entry(0.5, "one sequence and 64, beside reading the active weights once"),
    "compile": Entry(0.5, "registers, spills and occupancy for sm_80, sm_90, sm_100; needs no card", interpreted=False),
}
NEEDS_NO_CARD = ("compile",)


def module_of(stage: str) -> Stage:
    """Import a stage, in the process that runs it."""
    module: Stage = importlib.import_module(f".{stage}", __package__)  # type: ignore[assignment]
    return module

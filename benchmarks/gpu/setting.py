"""The setting of a stage: the machine, the code, the sizes of this run, and its deadline."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import platform
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bare import origin

from . import ROOT

Row = dict[str, Any]
CORE = "correctness; parts; step; training"
# What is lost without each package, by the name that it is imported by.
PACKAGES = {
    "rich": "correctness: resume; parts; step; training; decoding",
    "rustbpe": "correctness: resume; training",
    "tiktoken": f"{CORE}; decoding",
    "pyarrow": f"{CORE}; decoding",
    "safetensors": CORE,
    "triton": "our Triton kernels, radix selection, compiling on a GPU, the compile stage",
    "pytest": "correctness: the tests for a GPU",
    "hypothesis": "correctness: the tests for a GPU",
    "transformers": "layer: its experts as peers",
    "scattermoe": "layer: ScatterMoE as a peer",
    "megablocks": "layer: MegaBlocks as a peer",
    "sonicmoe": "layer: SonicMoE as a peer",
    "cut_cross_entropy": "parts: cut-cross-entropy as a peer of the head",
    "liger_kernel": "parts: Liger as a peer of the head",
}


class Case(NamedTuple):
    """One thing to measure or to check. run() returns its row and raises whatever goes wrong.

    seconds: about how long it takes on a GPU; a case is not started with less time than that left.
    """

    name: str
    run: Callable[[], Row]
    seconds: float = 5.0


class NotRunError(Exception):
    """A case cannot run here; the message says why, in one line."""


class OutOfTimeError(Exception):
    """A case ran out of time and resumes in the next run; the message says where."""


class Setting(NamedTuple):
    """One stage's orders. deadline: on the clock of `time.monotonic`, which all processes of a machine share."""

    out: Path
    dry: bool  # toy sizes
    cuda: bool  # False on the CPU
    data: str  # the text to train on, as `et train` accepts it
    deadline: float = float("inf")
    dtype: torch.dtype = torch.bfloat16  # the compute dtype of everything that is timed

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self.cuda else "cpu")

    @property
    def left(self) -> float:
        """Seconds until this stage's time is up."""
        return self.deadline - time.monotonic()

    def pick(self, on_gpu: Any, dry: Any) -> Any:
        """Return the size for a GPU or the toy one."""
        return dry if self.dry else on_gpu


def absent(packages: Iterable[str]) -> list[str]:
    """Return the packages that are not installed."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def require(*packages: str) -> None:
    """Raise NotRunError unless the packages are installed."""
    if lost := absent(packages):
        raise NotRunError(f"needs {lost[0]}, which is not installed")


def missing() -> list[str]:
    """Return a line for each package that is not installed."""
    return [f"missing: {name}; without it: {PACKAGES[name]}" for name in absent(PACKAGES)]


def card(device: torch.device) -> Row:
    """Return what must be equal when a run is resumed. Sets CUDA up in this process unless on a CPU.

    Two cards of one name are the same, though their bytes of memory differ by host. Raises ValueError without a card.
    """
    cuda = device.type == "cuda"
    if cuda and not torch.cuda.is_available():
        raise ValueError(
            f"torch {torch.__version__} sees no CUDA device; --dry-run runs every stage at toy sizes, "
            "--stages compile needs none"
        )
    name = torch.cuda.get_device_name(device) if cuda else None
    return {"device": device.type, "gpu": name, "torch": torch.__version__, "cuda": torch.version.cuda}


def code() -> str:
    """Return a hash of the code that is measured, of a checkout without Git, too."""
    hashed = hashlib.sha256()
    files = [path for folder in ("src", "benchmarks") for path in sorted((ROOT / folder).rglob("*"))]
    for path in files:
        if path.suffix in (".py", ".cpp", ".h"):
            hashed.update(path.read_bytes())
    return hashed.hexdigest()[:12]


def facts(setting: Setting) -> Row:
    """Return the card, the versions, the code, the commit and the date, for a stage's record."""
    packages = ("triton", "transformers", "numpy")
    versions = {name: None if absent([name]) else importlib.metadata.version(name) for name in packages}
    about = {"python": platform.python_version(), "code": code()}
    if setting.cuda:
        properties = torch.cuda.get_device_properties(setting.device)
        about |= {"memory": properties.total_memory, "processors": properties.multi_processor_count}
    return card(setting.device) | versions | about | origin()

"""Report the card, the versions, the commit, and what each missing package costs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re

import torch
from bare import origin

from .setting import Row

OLDEST_TORCH = (2, 11)
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
}


def missing() -> list[str]:
    """Return a line for each package that is not installed."""
    return [
        f"missing: {name}; without it: {lost}"
        for name, lost in PACKAGES.items()
        if importlib.util.find_spec(name) is None
    ]


def torch_too_old() -> str | None:
    """Return a line if this torch is older than the package needs, else None."""
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found is None or tuple(map(int, found.groups())) >= OLDEST_TORCH:
        return None
    return f"torch {torch.__version__} is too old; install torch>={'.'.join(map(str, OLDEST_TORCH))}"


def card(device: torch.device) -> Row:
    """Return what must be the same in a run that is resumed. Sets CUDA up in this process unless on a CPU."""
    if device.type != "cuda":
        return {"device": "cpu", "gpu": None, "torch": torch.__version__}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": "cuda",
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "processors": properties.multi_processor_count,
        "memory": properties.total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def facts(device: torch.device) -> Row:
    """Return the card, the versions, the commit and the date, for a stage's record."""
    versions = {}
    for name in ("triton", "transformers", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return card(device) | versions | {"python": platform.python_version()} | origin()

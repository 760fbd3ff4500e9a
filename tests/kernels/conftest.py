"""Fixtures that run the block kernels, natively or, on processors with only AVX-512, with emulated instructions."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import pytest
import torch

from expert_threshold.kernels.cpu import blocks, build

EMULATED = Path(__file__).parent / "emulated.h"
CAPABILITIES = torch.cpu.get_capabilities()


@functools.cache
def emulated() -> ctypes.CDLL | str:
    """Return the kernels built with the instructions in `emulated.h`, or why they cannot be built or run."""
    if not all(CAPABILITIES.get(f"avx512_{part}", False) for part in ("f", "bw", "dq", "vl")):
        return "a processor without AVX-512"
    flags = [*build.BLOCKS_FLAGS, *build.WARNINGS, "-include", str(EMULATED)]
    library = build.load(build.BLOCKS, [*build.PARTS, EMULATED], flags, build.LIBRARIES)
    return library if isinstance(library, str) or blocks.block_products() else "no block products"


@pytest.fixture(params=["native" if CAPABILITIES.get("avx512_bf16", False) else "emulated"])
def block_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with the kernels, and show in its name whether they are native or emulated."""
    library = blocks.library if request.param == "native" else emulated
    if isinstance(library(), str):
        pytest.skip(library())
    monkeypatch.setattr(blocks, "library", library)

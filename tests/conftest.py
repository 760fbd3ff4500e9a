"""Settings for all tests."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings

if TYPE_CHECKING:
    from expert_threshold.data import Tokenizer
    from expert_threshold.model import GPT

# How long an example takes says nothing about right or wrong on a shared machine. In CI the examples are the same ones
# every time: there a failure means that the code changed; new examples are tried wherever else the tests run.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")

# Without a GPU, kernels run in Triton's interpreter, which has to be said before triton is imported.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

# What the user has downloaded is not for tests.
os.environ["EXPERT_THRESHOLD_CACHE"] = os.devnull


@pytest.fixture(scope="module")
def model() -> GPT:
    from small_run import small_model  # not every test needs torch

    return small_model()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    from small_run import small_tokenizer

    return small_tokenizer()

"""Settings for all tests."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings

from commands import Refused, content

if TYPE_CHECKING:
    from expert_threshold.data import Tokenizer
    from expert_threshold.model import GPT

# How long an example takes says nothing about right or wrong on a shared machine. In CI the examples are the same ones
# every time: there a failure means that the code changed; new examples are tried wherever else the tests run, and many
# of them by `make soak`.
settings.register_profile("here", deadline=None, max_examples=30)
settings.register_profile("ci", deadline=None, max_examples=30, derandomize=True)
settings.register_profile("many", deadline=None, max_examples=1000)
settings.load_profile("ci" if os.environ.get("CI") else "here")

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, which the tests of signals do not expect

# Without a GPU, kernels run in Triton's interpreter, which has to be said before triton is imported.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

# What the server of forks imports before it forks.
multiprocessing.set_forkserver_preload(["torch._dynamo", "torch.distributed", "expert_threshold.cli.train"])

# What the user has downloaded is not for tests.
os.environ["EXPERT_THRESHOLD_CACHE"] = os.devnull


def pytest_collection_finish() -> None:
    """Spare every later collection of garbage, of which a run makes two, the objects of torch and of pytest."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # extension modules report what is never collected


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restore the number of threads of the process, which a run sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def read_once() -> Iterator[None]:
    """Read the embedded corpus, which takes seconds, once."""
    from expert_threshold.data import embedded

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "documents", functools.cache(embedded.documents))
        yield


@pytest.fixture(scope="module", autouse=True)
def undrawn(request: pytest.FixtureRequest) -> Iterator[pytest.MonkeyPatch]:
    """Leave figures out of pages, where they take longer than a short run does; the tests of the analysis draw them."""
    with pytest.MonkeyPatch.context() as patch:
        if "analysis" not in request.path.parts:
            patch.setattr("expert_threshold.analysis.page._figure", lambda *_: "")
        yield patch


@pytest.fixture
def drawn(undrawn: pytest.MonkeyPatch) -> None:
    """Draw figures in this test, and in those after it in its module."""
    undrawn.undo()


@pytest.fixture(scope="module")
def model() -> GPT:
    from cases import small_model  # not every test needs torch

    return small_model()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    from cases import small_tokenizer

    return small_tokenizer()


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Assert that a command is refused in one line, which has these words, and changes nothing; return the line."""

    from cases import et  # not every test needs torch

    def refused(arguments: Sequence[object], *words: str) -> str:
        before = content(tmp_path)
        capsys.readouterr()
        assert et(*arguments) == 2
        line = capsys.readouterr().err.splitlines()[-1]  # above it may stand what was begun
        assert line.startswith(("et: ", f"et {[*arguments, ''][0]}: "))
        assert [word for word in words if word not in line] == [], line
        assert content(tmp_path) == before
        return line

    return refused


@pytest.fixture
def fresh_memory_is_nan() -> Iterator[None]:
    """Fill with NaN what torch.empty and its like return."""
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)

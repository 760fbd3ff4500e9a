from __future__ import annotations

from pathlib import Path

import pytest

from tiny_runs import make_runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `make_runs`. No test may change it."""
    return make_runs(tmp_path_factory.mktemp("runs"))

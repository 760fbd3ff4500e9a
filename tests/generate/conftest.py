"""Both ways to decode."""

from __future__ import annotations

import pytest

from expert_threshold.generate import decoder


@pytest.fixture
def by_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode as if the machine had no compiler."""
    monkeypatch.setattr(decoder, "library", lambda: None)


@pytest.fixture(params=["operations", "kernel"])
def by(request: pytest.FixtureRequest) -> None:
    """Run a test with torch's operations and again with the kernel."""
    if request.param == "operations":
        request.getfixturevalue("by_operations")
    elif decoder.library() is None:
        pytest.skip("there is no C++ compiler, or kernels are switched off")

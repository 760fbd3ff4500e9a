"""Both ways to decode."""

from __future__ import annotations

import pytest

from expert_threshold.generate import kernel


@pytest.fixture
def by_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no compiler."""
    monkeypatch.setattr(kernel, "library", lambda: None)


@pytest.fixture(params=["operations", "kernel"])
def by(request: pytest.FixtureRequest) -> None:
    """By torch's operations, and by the kernel."""
    if request.param == "operations":
        request.getfixturevalue("by_operations")
    elif kernel.library() is None:
        pytest.skip("no C++ compiler")

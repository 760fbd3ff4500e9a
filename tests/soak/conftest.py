"""Commands that are killed or fail, and the table of docs/reliability.md after the tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

import campaign

from .forks import Forks


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, (trials, failures) in campaign.done.items():
        terminalreporter.write_line(f"| {name} | {trials:,} | {failures} |")


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    if sys.platform != "linux":
        pytest.skip("faults are injected into Linux's system calls")
    forks = Forks(tmp_path_factory.mktemp("forks"))
    yield forks
    forks.close()

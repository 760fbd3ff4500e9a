"""The lines that a run prints while it trains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cases import RULES
from commands import run_python
from expert_threshold.runs import RunFolder
from expert_threshold.train.log import Display, RunLog, clock, summary
from expert_threshold.train.state import Prepared

from .conftest import Plain, Start, tiny


@pytest.mark.parametrize("name", ["dense", "expert_threshold"])
def test_without_a_terminal_each_interval_is_one_line(name: str, start: Start, plain: Plain, tmp_path: Path) -> None:
    start(model=tiny(RULES[name]), console=plain.console, log_every=2)
    lines = [line for line in plain.text().splitlines() if re.match(r"step \d+/8  loss", line)]
    assert [line.split()[1] for line in lines] == ["2/8", "4/8", "6/8", "8/8"]
    for line in lines:
        assert re.search(r"loss \d+\.\d{4}  [\d,]+ tokens/s ", line)
        assert ("load spread" in line and "fanout" in line) == (name != "dense")
        assert re.search(r"\d+:\d\d left$", line)
    assert re.search(r"step 8/8  validation loss \d\.\d+  \d\.\d+ bits per byte", plain.text())
    assert "\x1b" not in plain.text()


def test_lines_are_not_broken_where_there_is_no_terminal(plain: Plain) -> None:
    with Display(plain.console) as display:
        display.say("[red] word " * 50)
    assert plain.text() == "[red] word " * 50 + "\n"


def test_on_a_terminal_one_line_lives_and_messages_stay(start: Start) -> None:
    terminal = Plain(force_terminal=True, width=140, color_system=None)
    start(console=terminal.console, log_every=2, title=lambda seconds: "[1 of 3]")
    text = terminal.text()
    assert re.search(r"\[1 of 3\] *\n *step 8/8  0:00 left", text)
    assert re.search(r"step 8/8  0:00 left  loss \d\.\d{4}.*tokens/s  load spread \d\.\d\d  fanout \d\.\d\d", text)
    assert not re.search(r"step \d/8  loss.*left\n", text)
    assert re.search(r"step 4/8  validation loss", text)


def test_a_title_opens_each_line_about_a_step(start: Start, plain: Plain) -> None:
    left: list[float | None] = []
    start(console=plain.console, log_every=4, title=lambda seconds: left.append(seconds) or "1 of 3")
    lines = [line for line in plain.text().splitlines() if "step" in line]
    assert [line.split("  ")[:2] for line in lines] == [["1 of 3", f"step {step}/8"] for step in (4, 4, 8, 8)]
    assert left[-1] is None
    assert left[-2] == 0.0


def test_without_a_console_nothing_is_printed(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    start(console=None)
    assert capfd.readouterr() == ("", "")


def test_a_long_task_tells_how_far_it_is(plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("expert_threshold.train.log.time.monotonic", lambda: now)
    with Display(plain.console) as display:
        progress = display.task("reading")
        for done in range(1, 13):
            now += 1
            progress(done, 12)
    assert plain.text() == "reading: 42%, 0:07 left\nreading: 83%, 0:02 left\n"


def test_time_left_is_that_of_steps_to_come_at_the_pace_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("expert_threshold.train.log.time.monotonic", lambda: now)
    state: Any = mock.Mock(step=10, steps=110, not_finite="", skipped_in_a_row=0, **{"is_due.return_value": False})
    state.parallel.ranks.from_main.side_effect = lambda make: make()
    left: list[float | None] = []
    log = RunLog(RunFolder(tmp_path), Prepared(state, *[mock.Mock()] * 4, None), Display(None), left.append, None)
    now, state.step = now + 40, 30  # resumed at step 10
    log.step()
    assert left == [160.0]


def test_the_summary_tells_the_worst_spread_and_the_mean_fanout() -> None:
    layers = {"1": {"load_spread": 1.5, "fanout_mean": 1.0}, "2": {"load_spread": 3.0, "fanout_mean": 0.5}}
    text = summary({"loss": 2.0, "tokens_per_second": 10.0, "layers": layers})
    assert text == "loss 2.0000  10 tokens/s  load spread 3.00  fanout 0.75"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (754, "12:34"), (3600, "1:00:00")])
def test_a_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_a_terminal_that_is_gone_or_a_closed_pipe_silences_a_run_and_does_not_end_it() -> None:
    program = """if True:
        import os, pty, sys
        from expert_threshold.train.log import RunConsole
        said = os.dup(1)
        for open_ends in (pty.openpty, os.pipe):
            reader, writer = open_ends()
            console = RunConsole(file=os.fdopen(max(reader, writer), "w"), force_terminal=True)
            os.close(min(reader, writer))
            console.print("to nobody")
            console.print("again")
            os.write(said, b"alive ")
    """
    assert run_python("-c", program).split() == ["alive", "alive"]

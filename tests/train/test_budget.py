"""A run that is given a time has the steps that fit into it, whatever becomes of the speed."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_threshold.optim.groups import falling
from expert_threshold.runs import RunFolder
from expert_threshold.train import evaluations, loop
from expert_threshold.train.budget import AIM, SHARE_OF_STEPS, TOLERANCE, Between, Budget
from expert_threshold.train.state import TrainState

from .conftest import Start
from .test_loop import assert_same_run, forget_after

SECONDS = 1000.0
Pace = Callable[[float], float]
"""Seconds of a step when so much of the time is gone."""


@dataclass
class Clock:
    time: float = 0.0
    stop_at: int = -1  # the step in which Ctrl-C comes


def run(
    pace: Pace, measured: float, validation: float = 0.0, guess: float = 0.0, every: int = 100
) -> tuple[float, float, Budget]:
    """A run by a clock: seconds until its last step, those of the last validation, and what was decided."""
    budget = Budget(round(SHARE_OF_STEPS * SECONDS / measured), SECONDS)
    gone, step = 0.0, 0
    while step < budget.steps_at(step):
        seconds = pace(gone / SECONDS)
        gone, step = gone + seconds, step + 1
        budget.took(seconds)
        decision = budget.decide(step, gone, {"validation": Between(every, guess)} if validation else {})
        if decision is not None:
            budget.decisions.append(decision)
        if validation and step % every == 0 and step < budget.steps_at(step):
            gone += validation
            budget.took(validation, "validation")
    return gone, validation, budget


PACES: dict[str, Pace] = {
    "steady": lambda gone: 1.0,
    "twice as fast after the first steps": lambda gone: 1.0 if gone < 0.02 else 0.5,
    "slower later": lambda gone: 1.0 if gone < 0.5 else 1.7,
    "faster later": lambda gone: 1.0 if gone < 0.7 else 0.6,
    "up and down": lambda gone: 1.0 + 0.4 * (int(10 * gone) % 2),
    "slower at the very end": lambda gone: 1.0 if gone < 0.93 else 3.0,
}


@pytest.mark.parametrize("name", PACES)
@pytest.mark.parametrize("measured", [0.6, 1.0, 1.6])
@pytest.mark.parametrize(("validation", "guess"), [(0.0, 0.0), (8.0, 0.0), (40.0, 30.0)])
def test_the_given_time_is_used_and_no_more(name: str, measured: float, validation: float, guess: float) -> None:
    """The steps were those of the speed measured first: a run of 3:45 ended after 2:58."""
    gone, last, _ = run(PACES[name], measured, validation, guess)
    assert 0.9 * SECONDS <= gone + last <= SECONDS


@given(paces=st.lists(st.floats(0.3, 3.0), min_size=20, max_size=20), measured=st.floats(0.3, 3.0))
@settings(deadline=None, max_examples=50)
def test_no_run_goes_on_for_more_than_a_step_after_its_time(paces: list[float], measured: float) -> None:
    gone, _, _ = run(lambda gone: paces[min(int(20 * gone), 19)], measured)
    assert gone <= SECONDS + max(paces)


def test_a_steady_speed_measured_right_changes_the_schedule_next_to_nothing() -> None:
    """All there is to correct is the time kept for what was not known to take none."""
    _, _, budget = run(PACES["steady"], measured=1.0)
    steps = budget.steps_at(10**6)
    assert (AIM - TOLERANCE) * SECONDS <= steps <= SECONDS
    changed = [b for a, b in itertools.pairwise(budget.decisions) if a.steps != b.steps]
    assert len(changed) == 1
    assert changed[0].seconds <= 0.06 * SECONDS
    for step in range(steps):
        factor, straight = falling(budget.progress(step), budget.scheduled, 0.1, 1.0), 1 - 0.9 * step / steps
        assert abs(factor - straight) < 0.01


@pytest.mark.parametrize("name", PACES)
def test_the_learning_rate_falls_without_a_jump_to_its_end(name: str) -> None:
    _, _, budget = run(PACES[name], measured=1.3)
    steps = budget.steps_at(10**6)
    places = [budget.progress(step) / budget.scheduled for step in range(steps + 1)]
    assert places[0] == 0
    assert places[-1] == pytest.approx(1) or budget.decisions[-1].step == steps  # ended by the clock
    rises = [b - a for a, b in itertools.pairwise(places)]
    assert 0 < min(rises) <= max(rises) < 0.05


def test_without_a_time_nothing_is_decided_and_places_are_the_steps_themselves() -> None:
    budget = Budget(7)
    assert [budget.progress(step) for step in range(8)] == list(range(8))
    budget.took(1e9)
    assert budget.decide(3, 1e9, {}) is None
    assert budget.steps_at(7) == 7


def test_a_resumed_run_makes_the_decisions_that_were_made() -> None:
    _, _, budget = run(PACES["slower later"], measured=1.0)
    again = Budget(1, SECONDS, json.loads(json.dumps(budget.decisions)))
    for step in range(budget.steps_at(10**6)):
        assert (again.progress(step), again.steps_at(step)) == (budget.progress(step), budget.steps_at(step))
    early = budget.decisions[1].step
    again.took(1.0)
    assert again.decide(early, 2 * SECONDS, {}) is None  # it has been decided what comes after this step


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replaces the timer's: steps of 0.2 seconds, twice as fast from the fifth on."""
    clock, train_step = Clock(), loop.train_step

    def timed(state: TrainState, status: Any) -> bool:
        clock.time += 0.2 if state.step < 5 else 0.1
        if state.step == clock.stop_at:
            signal.raise_signal(signal.SIGINT)
        return train_step(state, status)

    monkeypatch.setattr(loop, "train_step", timed)
    monkeypatch.setattr("expert_threshold.train.evaluations.now", lambda: clock.time)
    return clock


OPTIONS: dict[str, Any] = {
    "steps": 20, "accumulation": 1, "log_every": 1, "eval_every": None, "checkpoint_every": 8,
}  # fmt: skip


def test_a_run_keeps_its_time_and_is_repeated_from_any_checkpoint(start: Start, tmp_path: Path, clock: Clock) -> None:
    result = start("run", minutes=6 / 60, **OPTIONS)
    assert result.finished
    assert 0.9 * 6 <= result.elapsed <= 6
    assert result.step > 40
    run, again = RunFolder.open(tmp_path / "run"), tmp_path / "again"
    assert run.config["train"]["steps"] == result.step
    assert run.config["time"]["decisions"][0] == [0, 20, 0, False]
    shutil.copytree(run.path, again)  # as if it had been killed after its last decision, before its last checkpoints
    forget_after(again, 8)
    assert start("again", resume=True, **OPTIONS | {"steps": result.step}).step == result.step
    assert_same_run(run.path, again)


def test_a_stopped_run_goes_on_with_what_is_left_of_its_time(start: Start, tmp_path: Path, clock: Clock) -> None:
    clock.stop_at = 25
    assert start(minutes=6 / 60, **OPTIONS).step == 26
    clock.stop_at, clock.time = -1, 1e6  # however long it lay
    config = RunFolder.open(tmp_path / "run").config
    result = start(resume=True, **OPTIONS | {"steps": config["train"]["steps"]})
    assert result.finished
    assert 0.9 * 6 <= result.elapsed <= 6
    decisions = RunFolder.open(tmp_path / "run").config["time"]["decisions"]
    assert decisions[: len(config["time"]["decisions"])] == config["time"]["decisions"]


def test_a_resumed_run_counts_its_last_validation(start: Start, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkpoint is saved before, so that `et train --resume RUN --minutes N` did not know of it."""
    evaluate = evaluations.evaluate

    def slow(*arguments: Any, **options: Any) -> Any:
        clock.time += 5
        return evaluate(*arguments, **options)

    monkeypatch.setattr(evaluations, "evaluate", slow)
    options = OPTIONS | {"eval_every": 20}
    first = start(**options)
    assert first.elapsed > 5
    clock.time = 1e6
    assert start(resume=True, **options).elapsed == pytest.approx(first.elapsed)


def test_a_finished_run_is_given_more_time(start: Start, tmp_path: Path, clock: Clock) -> None:
    first = start(minutes=6 / 60, **OPTIONS)
    result = start(resume=True, minutes=12 / 60, **OPTIONS | {"steps": first.step})
    assert result.step > 1.5 * first.step
    assert 0.9 * 12 <= result.elapsed <= 12
    with pytest.raises(ValueError, match=r"minutes=0.1: .* has already used 0.\d+ minutes for \d+ steps; allow more"):
        start(resume=True, minutes=6 / 60, **OPTIONS | {"steps": result.step})


def test_a_run_killed_before_its_first_checkpoint_is_given_another_length(
    start: Start, tmp_path: Path, clock: Clock
) -> None:
    """Regression: it asked for the learning rate of step −1."""
    first = start(minutes=6 / 60, **OPTIONS)
    forget_after(tmp_path / "run", 0)
    options = OPTIONS | {"steps": first.step}
    with pytest.raises(ValueError, match=r"has already used 0 minutes for 0 steps; use --steps$"):
        start(resume=True, minutes=12 / 60, **options)
    assert start(resume=True, **options | {"steps": first.step + 5}).step == first.step + 5

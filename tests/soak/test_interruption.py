"""Runs that are killed at any moment, or told to stop, go on as if they had never been disturbed."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from campaign import campaign, trials
from expert_threshold.cli import INTERRUPTED
from expert_threshold.runs import RunFolder

from .forks import EVERY, Ended, Fault, Forks, clear, outcome, require_whole


def train(forks: Forks, run: Path, more: str, fault: Fault | None, rank: int | None) -> Ended:
    """Start or resume a run, on two ranks if `rank` says which of them has the fault; return that one's end."""
    arguments = forks.train(run, *more.split())
    if rank is None:
        return forks.run(arguments, fault)
    return forks.ranks(arguments, [fault if each == rank else None for each in range(2)])[rank]


def steps_made(run: Path) -> int:
    return max((record["step"] for record in RunFolder(run).metrics.read() if record["split"] == "train"), default=0)


@trials(40, few=1)
@pytest.mark.parametrize(
    ("moment", "more", "ranks"),
    [
        ("training", "", 1),
        ("training on two ranks", "--train.timeout 30", 2),
        ("saving", "--checkpoint-every 1 --train.keep-checkpoints 2", 1),
        ("validating", "--eval-every 1 --eval-tokens 256", 1),
    ],
)
def test_a_killed_run_loses_an_interval_at_most_and_ends_as_if_undisturbed(
    moment: str, more: str, ranks: int, trials: int, forks: Forks
) -> None:
    """An interval of checkpoints, and while one is being written also what is trained meanwhile."""
    whole, run = forks.folder / f"whole {moment}", forks.folder / "run"
    usual = train(forks, whole, more, Fault(whole), 0 if ranks == 2 else None)
    assert usual.code == 0, usual.err
    expected = outcome(whole)

    def trial(chance: random.Random) -> None:
        clear(run)
        rank = chance.randrange(2) if ranks == 2 else None
        fault = Fault(run, seconds=chance.uniform(0.001, usual.seconds))
        if moment == "saving":
            fault = Fault(run, at=chance.randint(1, usual.changes))
        ended = train(forks, run, more, fault, rank)
        assert ended.code in (-signal.SIGKILL, 0), ended.err
        saved = require_whole(run)
        assert steps_made(run) - max(saved, default=0) <= 2 * EVERY
        ended = train(forks, run, more, None, rank)
        assert ended.code == 0, ended.err
        assert outcome(run) == expected

    campaign(f"kill -9 while {moment}", trials, trial)


@trials(20)
def test_a_run_that_is_told_to_stop_saves_the_step_in_progress(trials: int, forks: Forks) -> None:
    whole, run = forks.folder / "whole", forks.folder / "run"
    usual = forks.run(forks.train(whole), Fault(whole))
    expected = outcome(whole)

    def trial(chance: random.Random) -> None:
        clear(run)
        seconds = chance.uniform(0.5, 1) * usual.seconds
        ended = forks.run(forks.train(run), Fault(run, seconds=seconds, signal=signal.SIGTERM))
        saved = max(require_whole(run), default=0)
        assert ended.code == (0 if saved else INTERRUPTED), ended.err  # before the first step there is nothing to save
        assert steps_made(run) == saved
        assert forks.run(forks.train(run)).code == 0
        assert outcome(run)[2:] == expected[2:]  # the step at which it stopped was saved, too

    campaign("SIGTERM", trials, trial)

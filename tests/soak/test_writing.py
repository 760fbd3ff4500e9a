"""Writes that fail at any point are reported in one line, harm nothing that was saved, and can be made again."""

from __future__ import annotations

import errno
import os
import random
import re
import signal

from campaign import campaign, trials
from commands import content

from .forks import Fault, Forks, clear, outcome, require_whole

KILL = 0
FULL, QUOTA, READ_ONLY, BROKEN = errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO


@trials(50, few=4)
def test_a_run_that_cannot_write_says_so_in_one_line_and_goes_on_where_it_can(trials: int, forks: Forks) -> None:
    whole, run = forks.folder / "whole writing", forks.folder / "run"
    more = ["--checkpoint-every", "1", "--train.keep-checkpoints", "2"]
    usual, expected = forks.run(forks.train(whole, *more), Fault(whole)), outcome(whole)

    def trial(chance: random.Random) -> None:
        clear(run)
        error = chance.choice([FULL, QUOTA, READ_ONLY, BROKEN])
        lasting = error != BROKEN or chance.random() < 0.5
        fault = Fault(run, chance.randint(1, usual.changes), error, lasting)
        ended = forks.run(forks.train(run, *more), fault)
        saved = require_whole(run)
        if ended.code == 0:  # it was a report, or what was not needed any more
            assert saved[-1] == 12
        else:
            assert ended.code == 2, ended.err
            line = rf"et train: {re.escape(str(run))}\S*: {re.escape(os.strerror(error))}; .+\n"
            assert re.fullmatch(line, ended.err), ended.err
        ended = forks.run(forks.train(run, *more))
        assert ended.code == 0, ended.err
        assert outcome(run) == expected

    campaign("failures of writing", trials, trial)


@trials(60)
def test_an_export_that_is_killed_or_cannot_write_leaves_nothing_or_the_whole_folder(trials: int, forks: Forks) -> None:
    run, to = forks.folder / "exported run", forks.folder / "exports" / "model"
    assert forks.run(forks.train(run)).code == 0
    export = ["export", str(run), "--to", str(to)]
    clear(to.parent)
    usual, expected, before = forks.run(export, Fault(to.parent)), content(to), content(run)

    def trial(chance: random.Random) -> None:
        clear(to.parent)
        error = chance.choice([*[KILL] * 6, FULL, QUOTA, BROKEN])
        ended = forks.run(export, Fault(to.parent, chance.randint(1, usual.changes), error))
        if error == KILL:
            assert ended.code in (-signal.SIGKILL, 0)
        elif ended.code:
            assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
            assert ended.err.startswith(f"et export: {to.parent}"), ended.err
            assert not to.exists()
        if not to.exists():
            assert forks.run(export).code == 0
        assert content(to) == expected
        assert content(run) == before

    campaign("kill -9 and failures of writing an export", trials, trial)

"""Checkpoints written in the background: a write that fails is told, whenever it fails."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest
import torch

from expert_threshold.distributed import Parallel, Status
from expert_threshold.runs import Checkpoint, RunFolder
from expert_threshold.runs import checkpoint as checkpoints
from expert_threshold.train import saving
from expert_threshold.train.saving import Saver

CHECKPOINT = Checkpoint(5, {"model": {"w": torch.ones(3)}}, {})


class Full:
    """Fails as on a full disk, once `allowed`."""

    def __init__(self) -> None:
        self.allowed = threading.Event()

    def __call__(self, *_: Any) -> NoReturn:
        assert self.allowed.wait(60)
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_write_that_fails_after_the_status_was_taken_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Full()
    monkeypatch.setattr(checkpoints, "write", full)
    saver = Saver(RunFolder(tmp_path), Parallel(), None)
    saver.save(CHECKPOINT)
    status = saver.status()
    full.allowed.set()
    assert saver._commit.exception(60) is not None
    saver.commit_if_written(status)
    with pytest.raises(OSError, match="No space left"):
        saver.commit_if_written(saver.status())


def test_a_commit_that_fails_after_the_last_status_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Full()

    class Ranks(Parallel):
        """The only rank of a group. The commit fails between its status and the sum of all ranks'."""

        def all_reduce(self, status: Status) -> Status:
            if saver._commit is not None:
                full.allowed.set()
                saver._commit.exception(60)
            return status

    monkeypatch.setattr(checkpoints, "commit", full)
    monkeypatch.setattr(saving, "gather", lambda value, _: [value])
    saver = Saver(RunFolder(tmp_path), Ranks(world=cast(Any, object())), None)
    saver.save(CHECKPOINT)
    with pytest.raises(OSError, match="No space left"):
        saver.finish()

"""Writes checkpoints in the background, so that training only waits for the copy to host memory."""

from __future__ import annotations

import shutil
import time
from collections import ChainMap
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..data.loader import gather
from ..distributed import Parallel, Status
from ..runs import Checkpoint, Fingerprints, Part, RunFolder
from ..runs import checkpoint as checkpoints

POLL = 0.02  # seconds between checks of what other ranks have written


class LostSaveError(Exception):
    """Raised if another rank could not save. That rank reports the reason."""


class Saver:
    """Writes a run's checkpoints, one at a time. Keeps the newest `keep` checkpoints, or all if `keep` is None.

    All ranks write their files at the same time. Their status is part of every step's all-reduce, so all ranks learn at
    the same step that the files are complete. The main rank then commits the checkpoint. torch.distributed.checkpoint
    is not used because it would pickle its metadata.
    """

    def __init__(self, folder: RunFolder, parallel: Parallel, keep: int | None) -> None:
        self._folder = folder
        self._parallel = parallel
        self._keep = keep
        self._pool = ThreadPoolExecutor(1, "save")
        self._saved: Checkpoint | None = None  # a copy that is being written
        self._temporary: Path | None = None
        self._files: Future[Fingerprints] | None = None
        self._commit: Future[None] | None = None

    def save(self, checkpoint: Checkpoint) -> None:
        """Wait for the previous checkpoint, then copy this one and start writing it. All ranks must call this."""
        self.finish()
        assert self._saved is None
        parallel, folder = self._parallel, self._folder
        saved = Checkpoint(checkpoint.step, _copies(checkpoint.tensors), checkpoint.state)
        if parallel.world is None:
            self._commit = self._pool.submit(folder.save_checkpoint, *saved, self._keep)
        else:
            # The store is not used here, since it is lost with the launcher, just when saving matters most.
            made = checkpoints.begin(folder.checkpoints_path, saved.step) if parallel.ranks.is_main else None
            self._temporary = gather(made, parallel.world)[0]
            if self._temporary is None:  # this step is already saved
                return
            self._files = self._pool.submit(
                checkpoints.write_files, self._temporary, saved.tensors, parallel.ranks.rank
            )
        self._saved = saved

    def status(self, stop: bool = False) -> Status:
        """Return this rank's status. stop: True if this rank asks the run to stop."""
        files, commit = self._files, self._commit
        failed = any(future is not None and future.done() and future.exception() for future in (files, commit))
        written = files is not None and files.done() and not failed
        return Status(int(stop), int(self._saved is not None), int(written), int(failed))

    def commit_if_written(self, status: Status) -> None:
        """Commit the checkpoint if `status`, the sum over all ranks, shows that every file is complete.

        A rank that could not write raises its own error, and every other rank raises LostSaveError.
        """
        if status.failed:
            self._raise()
        if self._parallel.world is not None and status.written == self._parallel.ranks.world_size:
            assert self._files is not None
            assert self._saved is not None
            files = dict(ChainMap(*gather(self._files.result(), self._parallel.world)))
            self._files = None
            if self._parallel.ranks.is_main:
                parent, (step, _, state) = self._folder.checkpoints_path, self._saved
                self._commit = self._pool.submit(checkpoints.commit, parent, step, files, state, self._keep)
            else:
                self._saved = None
        # A commit that failed after the status was taken is kept, so that the next status reports it to all ranks.
        if self._commit is not None and self._commit.done() and self._commit.exception() is None:
            self._commit, self._saved = None, None

    def finish(self) -> None:
        """Wait until the checkpoint is complete. All ranks must call this. Raises as `commit_if_written` does."""
        if self._parallel.world is None:
            if self._commit is not None:
                self._commit.exception()
            self.commit_if_written(self.status())
            return
        while (status := self._parallel.all_reduce(self.status())).saving:
            self.commit_if_written(status)
            time.sleep(POLL)

    def close(self) -> None:
        """Wait for the thread. If there are several ranks, discard a checkpoint that has not been committed yet."""
        self._pool.shutdown()
        if self._temporary is not None and self._parallel.ranks.is_main:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _raise(self) -> None:
        for future in (self._files, self._commit):
            if future is not None and future.done() and (error := future.exception()) is not None:
                self._files = self._commit = self._saved = None
                raise error
        raise LostSaveError


def _copies(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return copies in host memory, which share no memory with the tensors that are being trained."""

    def copy(value: Any) -> Any:
        if isinstance(value, Part):
            return value._replace(tensor=copy(value.tensor))
        return value.detach().to("cpu", copy=True).contiguous()

    return {part: {name: copy(value) for name, value in named.items()} for part, named in tensors.items()}

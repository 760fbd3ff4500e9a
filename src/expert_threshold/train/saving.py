"""Checkpoints written beside training, which waits for no more than the copy to the host's memory."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..data.stream import gather
from ..distributed import Parallel, Status
from ..runs import Checkpoint, Fingerprints, Part, RunFolder

POLL = 0.02  # seconds between two looks at what others have written


class LostSaveError(Exception):
    """Another rank cannot save, and says why."""


class Saver:
    """Of one run. All ranks write their files at once; when each has told that its are whole, the first commits them.

    Ranks tell each other by the votes of every step, so that all learn of it in the same one.
    """

    def __init__(self, folder: RunFolder, parallel: Parallel, keep: int | None) -> None:
        self._folder = folder
        self._parallel = parallel
        self._keep = keep
        self._pool = ThreadPoolExecutor(1, "save")
        self._saved: Checkpoint | None = None  # what is being saved, a copy
        self._temporary: Path | None = None
        self._files: Future[Fingerprints] | None = None
        self._commit: Future[None] | None = None

    def begin(self, checkpoint: Checkpoint) -> None:
        """Take a copy and begin to write it. All ranks together; none may be at work on an earlier one any more."""
        assert self._saved is None
        parallel, folder = self._parallel, self._folder
        saved = Checkpoint(checkpoint.step, _copies(checkpoint.tensors), checkpoint.state)
        if parallel.world is None:
            self._commit = self._pool.submit(folder.save_checkpoint, *saved, self._keep)
        else:
            path = parallel.from_main(lambda: _text(folder.begin_checkpoint(saved.step)))
            if path is None:
                return
            self._temporary = Path(path)
            self._files = self._pool.submit(folder.write_files, self._temporary, saved.tensors, parallel.rank)
        self._saved = saved

    def ballot(self, stop: bool = False) -> Status:
        """What to tell the others."""
        files, commit = self._files, self._commit
        failed = any(future is not None and future.done() and future.exception() for future in (files, commit))
        written = files is not None and files.done() and not failed
        return Status(int(stop), int(self._saved is not None), int(written), int(failed))

    def heed(self, votes: Status) -> None:
        """Go on as all ranks' votes say. Raises what went wrong with writing, on every rank."""
        if votes.failed:
            self._raise()
        if self._parallel.world is not None and votes.written == self._parallel.world_size:
            assert self._files is not None
            assert self._saved is not None
            files: Fingerprints = {}
            for text in gather(_bytes(self._files.result()), self._parallel.world):
                files |= json.loads(text.tobytes())
            self._files = None
            if self._parallel.is_main:
                _, _, state = self._saved
                self._commit = self._pool.submit(
                    self._folder.commit_checkpoint, self._saved.step, files, state, self._keep
                )
            else:
                self._saved = None
        if self._commit is not None and self._commit.done():
            self._commit, self._saved = None, None

    def finish(self, vote: Callable[[Status], Status]) -> None:
        """Wait until what is being saved is there whole, on all ranks together. Raises as `heed` does."""
        if self._parallel.world is None:
            if self._commit is not None:
                self._commit.exception()
            self.heed(self.ballot())
            return
        while (votes := vote(self.ballot())).saving:
            self.heed(votes)
            time.sleep(POLL)

    def close(self) -> None:
        """Wait for the thread; what other ranks had to commit together with this one is given up."""
        self._pool.shutdown()
        if self._temporary is not None and self._parallel.is_main:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _raise(self) -> None:
        for future in (self._files, self._commit):
            if future is not None and future.done():
                error = future.exception()
                if error is not None:
                    self._files = self._commit = self._saved = None
                    raise error
        raise LostSaveError


def _bytes(files: Fingerprints) -> npt.NDArray[np.uint8]:
    return np.frombuffer(json.dumps(files).encode(), np.uint8)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _copies(tensors: dict[str, Any]) -> dict[str, Any]:
    """On the host, sharing no memory with what training changes."""

    def copy(value: torch.Tensor | Part) -> torch.Tensor | Part:
        if isinstance(value, Part):
            return value._replace(tensor=_copy(value.tensor))
        return _copy(value)

    return {part: {name: copy(value) for name, value in named.items()} for part, named in tensors.items()}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()

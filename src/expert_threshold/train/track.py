"""Sends metrics to other programs: TensorBoard and trackio, from the extra `track`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from ..install import install
from ..runs import RunFolder
from .config import TrackerName


class Tracker(Protocol):
    """Receives the lines of metrics.jsonl, flattened: `train/loss`, `train/layers/1/usage/0`, …"""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Writes event files in the run folder; those of steps after `step` are hidden."""

    def __init__(self, folder: RunFolder, config: Mapping[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder.path / "tensorboard"), purge_step=step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Trackio:
    """Logs to a run, named like the folder, of the local project `expert-threshold`."""

    def __init__(self, folder: RunFolder, config: Mapping[str, Any], step: int) -> None:
        import trackio

        # Folders of the same name in different places are different runs.
        resume = "allow" if step > 0 else "never"
        self._run = trackio.init("expert-threshold", name=folder.path.name, config=dict(config), resume=resume)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, type[TensorBoard] | type[Trackio]] = {"tensorboard": TensorBoard, "trackio": Trackio}
PACKAGES = {"tensorboard": "torch.utils.tensorboard", "trackio": "trackio"}


def require_tracker(name: TrackerName) -> None:
    """Raise ValueError if the package of that tracker is not installed."""
    if name == "none":
        return
    try:
        importlib.import_module(PACKAGES[name])
    except ImportError as error:
        raise ValueError(
            f"track={name!r} needs a package that is not installed ({error}); run: {install('track')}, or use 'none'"
        ) from None


@contextmanager
def tracking(name: TrackerName, folder: RunFolder, config: Mapping[str, Any], step: int) -> Iterator[Tracker | None]:
    """Open the tracker of that name; yields None for 'none'."""
    if name == "none":
        yield None
        return
    tracker = TRACKERS[name](folder, config, step)
    try:
        yield tracker
    finally:
        tracker.close()


def flatten(record: Any, name: str) -> dict[str, float]:
    """Returns every number in a record by its path."""
    if isinstance(record, Mapping):
        return {path: v for key, item in record.items() for path, v in flatten(item, f"{name}/{key}").items()}
    if isinstance(record, list):
        return {path: v for i, item in enumerate(record) for path, v in flatten(item, f"{name}/{i}").items()}
    return {name: float(record)} if isinstance(record, int | float) else {}

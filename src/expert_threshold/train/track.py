"""Sends metrics to other programs: TensorBoard and trackio, from the extra `track`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..install import install
from ..runs import RunFolder
from .config import TrackerName

PACKAGES: dict[TrackerName, str] = {"tensorboard": "torch.utils.tensorboard", "trackio": "trackio"}

Track = Callable[[int, Mapping[str, float]], None]
"""Receives a step and a line of metrics.jsonl, flattened: `train/loss`, `train/layers/1/usage/0`, …"""


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
def tracking(name: TrackerName, folder: RunFolder, config: Mapping[str, Any], step: int) -> Iterator[Track | None]:
    """Open the tracker of that name for a run that continues after `step`; yield None for 'none'.

    TensorBoard's event files go to the run folder; those of later steps are hidden. trackio logs to a run, named like
    the folder, of the local project `expert-threshold`.
    """
    if name == "none":
        yield None
        return
    package = importlib.import_module(PACKAGES[name])
    if name == "tensorboard":
        with package.SummaryWriter(str(folder.path / "tensorboard"), purge_step=step + 1) as writer:

            def track(step: int, values: Mapping[str, float]) -> None:
                for path, value in values.items():
                    writer.add_scalar(path, value, step)

            yield track
        return
    # Folders of the same name in different places are different runs.
    resume = "allow" if step > 0 else "never"
    run = package.init("expert-threshold", name=folder.path.name, config=dict(config), resume=resume)
    try:
        yield lambda step, values: run.log(dict(values), step=step)
    finally:
        run.finish()


def flatten(record: Any, name: str) -> dict[str, float]:
    """Return every number in a record by its path."""
    if isinstance(record, list):
        record = dict(enumerate(record))
    if isinstance(record, Mapping):
        return {path: v for key, item in record.items() for path, v in flatten(item, f"{name}/{key}").items()}
    return {name: float(record)} if isinstance(record, int | float) else {}

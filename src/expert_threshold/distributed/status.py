"""The status that ranks exchange at every step, so that all of them save, stop or fail in the same one."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist


class Status(NamedTuple):
    """One rank's status, each field 0 or 1; once all-reduced, how many ranks report it."""

    stop: int = 0  # a signal asked the run to stop
    saving: int = 0  # a checkpoint is being written
    written: int = 0  # this rank's files of it are complete
    failed: int = 0  # they could not be written


def all_reduce_status(status: Status, group: dist.ProcessGroup | None, device: torch.device) -> Status:
    """Return the sum of all ranks' statuses; `status` itself without a group."""
    if group is None:
        return status
    total = torch.tensor(status, device=device)
    dist.all_reduce(total, group=group)
    return Status(*total.tolist())

"""One rank of the test of shared reading, see `ranks.run_on_ranks`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_loader import Parts

from expert_threshold.data import Loader, Tokens, loader
from ranks import join


class Watched(Parts):
    """Twenty parts, the last of which can be damaged; what was read here is noted."""

    def __init__(self, damaged: bool = False) -> None:
        super().__init__([[part % 4 + 1, 7] for part in range(20)])
        self.bytes, self.damaged, self.seen = [100] * 20, damaged, set[int]()

    def read(self, part: int) -> Tokens:
        self.seen.add(part)
        if self.damaged and part == 19:
            raise ValueError("part 19 is damaged: größer")
        return super().read(part)


def batches(loader: Loader, count: int) -> Iterator[torch.Tensor]:
    return (torch.stack(next(loader)) for _ in range(count))


def check_equal(rank: int, ranks: int, group: dist.ProcessGroup) -> None:
    parts = Watched()
    alone = Loader(Watched(), 2 * ranks, 5, seed=1)
    mine = Loader(parts, 2, 5, seed=1, rank=rank, ranks=ranks, group=group, threads=2)
    for theirs, ours in zip(batches(alone, 5), batches(mine, 5), strict=True):
        torch.testing.assert_close(ours, theirs[:, 2 * rank : 2 * rank + 2], rtol=0, atol=0)
        assert mine.position == alone.position
    assert alone.position.epoch == 0
    assert len(parts.seen) < 20, "each rank reads its own parts"


def check_faults(rank: int, ranks: int, group: dist.ProcessGroup) -> None:
    """One rank finds the damage; all end with its message."""
    loader = Loader(Watched(damaged=True), 2, 5, seed=1, rank=rank, ranks=ranks, group=group)
    with pytest.raises(ValueError, match=r"^part 19 is damaged: größer$"):
        list(batches(loader, 40))


def main(rank: int, ranks: int, folder: Path) -> None:
    group = join(rank, ranks, folder)
    loader.BLOCK_BYTES = 500
    check_equal(rank, ranks, group)
    check_faults(rank, ranks, group)

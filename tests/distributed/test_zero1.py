"""ZeRO-1: the order in which ranks gather what their optimizers have moved."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from expert_threshold.distributed import zero1
from expert_threshold.distributed.optimizer_shards import LocalParameter, Slice
from expert_threshold.optim import OptimConfig, make_optimizers


class Ranks:
    """A process group, as far as making the buckets needs one."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._ranks


def gathers(tables: dict[str, int], width: int, rank: int, ranks: int) -> list[int]:
    """Return the buckets of tables (rows, width) in the order in which a rank begins to gather them in a step."""
    group = cast(Any, Ranks(rank, ranks))
    replicas = [
        LocalParameter(name, nn.Parameter(torch.zeros(rows, width)), True, Slice(0, rows, (rows, width)), group)
        for name, rows in tables.items()
    ]
    shards = zero1.ZeRO1(replicas)
    begun: list[int] = []
    for number, bucket in enumerate(shards.buckets):
        bucket.gather = lambda number=number: begun.append(number)  # type: ignore[method-assign, misc]
        bucket.waiting = set(bucket.owned)
    for parameter in shards.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizers = make_optimizers(shards.parameters.items(), OptimConfig(adamw_warmup_steps=0), width)
    optimizers.step(0, 10, None, shards.gather_updated)
    assert sorted(begun) == list(range(len(shards.buckets)))
    return begun


@pytest.mark.parametrize(("layers", "rows", "width", "ranks"), [(6, 256, 24, 3), (6, 256, 24, 6)])
def test_all_ranks_gather_buckets_in_one_order(
    layers: int, rows: int, width: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables were grouped by the rows that a rank owns, so that ranks began gathers of unequal sizes together."""
    monkeypatch.setattr(zero1, "BUCKET_BYTES", 2 * rows * width * 4)
    names = ["embed", *(f"blocks.{layer}.attention.value_embed" for layer in range(layers)), "head"]
    tables = {f"{name}.weight": rows for name in names}
    orders = [gathers(tables, width, rank, ranks) for rank in range(ranks)]
    assert len(orders[0]) > 2
    assert orders == [orders[0]] * ranks

"""ZeRO-1: the order in which ranks gather what their optimizers have moved."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch import nn

from expert_threshold.distributed import zero1
from expert_threshold.distributed.optimizer_shards import LocalParameter, Slice
from expert_threshold.optim import OptimConfig, make_optimizers


def gathers(tables: dict[str, int], width: int, rank: int, ranks: int) -> list[int]:
    """Return the buckets of tables (rows, width) in the order in which a rank begins to gather them in a step."""
    group = Mock(**{"rank.return_value": rank, "size.return_value": ranks})
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


@pytest.mark.parametrize("ranks", [3, 6])
def test_all_ranks_gather_buckets_in_one_order(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables were grouped by the rows that a rank owns, so that ranks began gathers of unequal sizes together."""
    rows, width = 256, 24
    monkeypatch.setattr(zero1, "BUCKET_BYTES", 2 * rows * width * 4)
    names = ["embed", *(f"blocks.{layer}.attention.value_embed" for layer in range(6)), "head"]
    tables = {f"{name}.weight": rows for name in names}
    orders = [gathers(tables, width, rank, ranks) for rank in range(ranks)]
    assert len(orders[0]) > 2
    assert orders == [orders[0]] * ranks

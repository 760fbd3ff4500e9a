"""One rank of the tests of `follow`, see `ranks.run_on_ranks`.

Every rank knows all tokens and also trains a single-process model for comparison.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_follow import Foreign, followed
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from expert_threshold.optim import Muon
from expert_threshold.routing import ExpertChoice, ExpertThreshold, Rule, TokenChoice
from ranks import join

RULES: dict[str, Rule] = {
    "expert_threshold": ExpertThreshold(4, decay=0.5, warmup_steps=2),
    "trend": ExpertThreshold(4, decay=0.5, warmup_steps=2, estimator="trend"),
    "expert_choice": ExpertChoice(4, decay=0.5, pool="global"),
    "global_aux": TokenChoice(4, 1, balance="global_aux", aux_strength=0.1),
    "loss_free": TokenChoice(4, 2, balance="loss_free", bias_rate=0.1),
}
MICRO_BATCHES = 2
Wrapped = tuple[nn.Module, torch.optim.Optimizer]


def model_of(name: str) -> Foreign:
    return Foreign(RULES[name], z_loss=0.01 if name == "expert_threshold" else None)


def start(model: nn.Module, group: dist.ProcessGroup | None = None) -> torch.optim.Optimizer:
    """Follow the model and return its optimizer."""
    return followed(model, loss_scale=1 / MICRO_BATCHES, group=group)[1]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, data: Tensor, rows: slice) -> None:
    """data: (steps, micro-batches, sequences, time, d_model); rows: the sequences of this rank."""
    for micro_batches in data:
        optimizer.zero_grad()
        for x in micro_batches:
            (model(x[rows]).square().mean() / MICRO_BATCHES).backward()
        optimizer.step()


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def ddp_followed(model: Foreign) -> Wrapped:
    ddp = DistributedDataParallel(model)
    return ddp, start(ddp)


def ddp_of_followed(model: Foreign) -> Wrapped:
    optimizer = start(model)
    return DistributedDataParallel(model), optimizer


def fsdp2(model: Foreign) -> Wrapped:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    with pytest.raises(ValueError, match=r"parameter inner.weight of shape \(8, 8\) is sharded, as by fully_shard"):
        Muon([("inner.weight", model.inner.weight)])  # failed in its first step
    return model, start(model)


def check(name: str, wrap: Callable[[Foreign], Wrapped], rank: int, ranks: int, group: dist.ProcessGroup) -> None:
    """Two ranks with half of the sequences each finish with the weights of one process with all sequences."""
    data = torch.randn(6, MICRO_BATCHES, 2 * ranks, 8, 8, generator=torch.Generator().manual_seed(1))
    alone, model = model_of(name), model_of(name)
    steps(alone, start(alone, dist.new_subgroups(1)[0]), data, slice(None))  # in a group of this rank
    steps(*wrap(model), data, slice(2 * rank, 2 * rank + 2))
    for value, expected in zip(model.states(), alone.states(), strict=True):
        everywhere = [torch.empty_like(value) for _ in range(ranks)]
        dist.all_gather(everywhere, value, group=group)
        assert all(torch.equal(there, value) for there in everywhere), f"{name}: ranks differ"
        if value.dim() < 2:  # sketches are of each forward
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name} {text}")
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(found), expected, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name} {text}")


def check_not_finite(rank: int) -> None:
    """If one rank's observation is not finite, no rank updates its rules."""
    model, optimizer, _ = followed(model_of("expert_threshold"))
    x = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(rank))
    model(x).mean().backward()
    optimizer.step()
    copy.deepcopy(model)  # raised TypeError, as pickling did: "cannot pickle ProcessGroup"
    assert pickle.loads(pickle.dumps(model)).layers[0].router.group is None
    before = model.states()
    row = model.layers[1].router.weight.data[2]
    if rank == 1:
        row.fill_(torch.nan)
    model(x).mean().backward()
    with pytest.warns(UserWarning, match=r"scores of expert 2 in layers.1.router are not finite"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.states(), before, strict=True))


def check_a_rank_without_a_forward(rank: int) -> None:
    """A rank without a forward joins the all-reduce with zeros."""
    model, optimizer, _ = followed(Foreign(TokenChoice(4, 1, balance="loss_free", bias_rate=0.1)))
    x = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
    model(x).mean().backward()
    optimizer.step()
    before = model.states()
    if rank == 0:
        model(x).mean().backward()
    optimizer.step()
    for value, old in zip(model.states(), before, strict=True):
        assert not torch.equal(value, old)
    optimizer.step()


def main(rank: int, ranks: int, folder: Path) -> None:
    group = join(rank, ranks, folder)
    for name in RULES:
        check(name, ddp_followed, rank, ranks, group)
        check(name, fsdp2, rank, ranks, group)
    check("expert_threshold", ddp_of_followed, rank, ranks, group)
    check_not_finite(rank)
    check_a_rank_without_a_forward(rank)

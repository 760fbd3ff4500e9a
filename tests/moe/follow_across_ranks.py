"""One rank of the tests of `follow`, see `ranks.run_on_ranks`.

Every rank knows the tokens of all, and trains one process's model beside its own, to compare with.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from expert_threshold.moe import Follower, MoE, follow
from expert_threshold.optim import Muon
from expert_threshold.routing import ExpertChoice, ExpertThreshold, Rule, TokenChoice
from ranks import join

RULES: dict[str, tuple[Rule, float | None]] = {
    "expert_threshold": (ExpertThreshold(4, decay=0.5, warmup_steps=2), 0.01),
    "trend": (ExpertThreshold(4, decay=0.5, warmup_steps=2, estimator="trend"), None),
    "expert_choice": (ExpertChoice(4, decay=0.5, pool="global"), None),
    "global_aux": (TokenChoice(4, 1, balance="global_aux", aux_strength=0.1), None),
    "loss_free": (TokenChoice(4, 2, balance="loss_free", bias_rate=0.1), None),
}
MICRO_BATCHES = 2


class Block(nn.Module):
    def __init__(self, rule: Rule, z_loss: float | None) -> None:
        super().__init__()
        self.moe = MoE(8, 12, rule, z_loss=z_loss)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.moe(x)
        y += x  # under `fully_shard` of the layer this ended in a segmentation fault, where y was a view
        return y


class Model(nn.Module):
    def __init__(self, rule: Rule, z_loss: float | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8)
        self.layers = nn.ModuleList([Block(rule, z_loss) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for layer in self.layers:
            x = layer(x)
        return x


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, data: Tensor, rows: slice) -> None:
    """data: (steps, micro-batches, sequences, time, d_model), of which these sequences are this rank's."""
    for micro_batches in data:
        optimizer.zero_grad()
        for x in micro_batches:
            (model(x[rows]).square().mean() / MICRO_BATCHES).backward()
        optimizer.step()


def state(model: Model) -> list[Tensor]:
    """Return the states of the rules."""
    return [value for layer in model.layers for value in layer.moe.router.state]


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def ddp_followed(model: Model, start: Callable[[nn.Module], Follower]) -> nn.Module:
    ddp = DistributedDataParallel(model)
    start(ddp)
    return ddp


def ddp_of_followed(model: Model, start: Callable[[nn.Module], Follower]) -> nn.Module:
    start(model)
    return DistributedDataParallel(model)


def fsdp2(model: Model, start: Callable[[nn.Module], Follower]) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer.moe)
    fully_shard(model)
    with pytest.raises(ValueError, match=r"parameter inner.weight of shape \(8, 8\) is sharded, as by fully_shard"):
        Muon([("inner.weight", model.inner.weight)])  # failed in its first step
    start(model)
    return model


def check(name: str, wrap: Callable[..., nn.Module], rank: int, ranks: int, group: dist.ProcessGroup) -> None:
    """Two ranks with half of the sequences each end where one process does that saw them all."""
    data = torch.randn(6, MICRO_BATCHES, 2 * ranks, 8, 8, generator=torch.Generator().manual_seed(1))
    alone = Model(*RULES[name])
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    mine = dist.new_subgroups(1)[0]  # a group of this rank
    follow(alone, optimizer, loss_scale=1 / MICRO_BATCHES, group=mine)
    steps(alone, optimizer, data, slice(None))

    model = Model(*RULES[name])
    optimizers = []

    def start(followed: nn.Module) -> Follower:
        optimizers.append(torch.optim.SGD(followed.parameters(), 0.1))
        return follow(followed, optimizers[0], loss_scale=1 / MICRO_BATCHES)

    wrapped = wrap(model, start)
    steps(wrapped, optimizers[0], data, slice(2 * rank, 2 * rank + 2))
    for value, expected in zip(state(model), state(alone), strict=True):
        everywhere = [torch.empty_like(value) for _ in range(ranks)]
        dist.all_gather(everywhere, value, group=group)
        assert all(torch.equal(there, value) for there in everywhere), f"{name}: ranks differ"
        if value.dim() < 2:  # sketches are of each forward
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name} {text}")
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(found), expected, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name} {text}")


def check_not_finite(rank: int) -> None:
    """An observation of one rank that is not finite stops the rules of all."""
    model = Model(*RULES["expert_threshold"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    follow(model, optimizer)
    x = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(rank))
    model(x).mean().backward()
    optimizer.step()
    copy.deepcopy(model)  # raised TypeError, as pickling did: "cannot pickle ProcessGroup"
    assert pickle.loads(pickle.dumps(model)).layers[0].moe.router.group is None
    before = [value.clone() for value in state(model)]
    row = model.layers[1].moe.router.weight.data[2]
    if rank == 1:
        row.fill_(torch.nan)
    model(x).mean().backward()
    with pytest.warns(UserWarning, match=r"scores of expert 2 in layers.1.moe.router are not finite"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(state(model), before, strict=True))


def check_a_rank_without_a_forward(rank: int) -> None:
    """It takes part in the sum, with nothing."""
    model = Model(TokenChoice(4, 1, balance="loss_free", bias_rate=0.1), None)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    follow(model, optimizer)
    x = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
    model(x).mean().backward()
    optimizer.step()
    before = [value.clone() for value in state(model)]
    if rank == 0:
        model(x).mean().backward()
    optimizer.step()
    for value, old in zip(state(model), before, strict=True):
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

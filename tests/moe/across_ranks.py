"""One rank of the tests of expert parallelism, see `ranks.run_on_ranks`.

Every rank knows the tokens of all, so that each checks its own part against the single-process layer.
"""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from expert_threshold.moe import Experts, MoE
from expert_threshold.moe.sharding import expert_parameters, shard_experts
from expert_threshold.routing import ExpertChoice, ExpertThreshold, Rule, TokenChoice
from ranks import Collectives, join, mine
from routed_sum import assert_same

EXPERTS, D_MODEL, D_EXPERT = 8, 6, 10
SHARES = {2: [(6, 6), (7, 2), (0, 9), (0, 0)], 4: [(4, 4, 4, 4), (5, 1, 0, 8), (0, 0, 0, 3)]}
BY_COUNT = ["alltoall_base_"] * 3


def new_layer(rule: Rule | None = None, **options: Any) -> MoE:
    torch.manual_seed(1)
    return MoE(D_MODEL, D_EXPERT, rule or TokenChoice(EXPERTS, 2), **options)


def assignments(tokens: int, every: int = 1) -> dict[str, Tensor]:
    """Return assignments (tokens, experts) with various fanouts, empty experts, a single expert, or at random."""
    place = (torch.arange(EXPERTS) - 3 * torch.arange(tokens)[:, None]) % EXPERTS
    any_of_them = torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(3)) < 0.3
    return {
        **{f"fanout {n}": place < n for n in {*range(0, EXPERTS, every), EXPERTS}},
        "any": any_of_them,
        "empty experts": any_of_them & (torch.arange(EXPERTS) % 3 == 0),
        "one rank's experts": any_of_them & (torch.arange(EXPERTS) >= EXPERTS - 2),
        "one expert": torch.arange(EXPERTS).eq(5).repeat(tokens, 1),
    }


def gradients(layer: nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in layer.named_parameters()}


def as_one_process(found: dict[str, Tensor], layer: nn.Module, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Return the gradients of the summed losses. Owners have those of experts; others are summed over ranks."""
    groups = expert_parameters(layer)
    for name, gradient in found.items():
        if name in groups:
            parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size(groups[name]))]
            dist.all_gather(parts, gradient.contiguous(), group=groups[name])
            found[name] = torch.cat(parts)
        else:
            dist.all_reduce(gradient, group=group)
    return found


def forward(layer: MoE, x: Tensor, assignment: Tensor | None) -> Tensor:
    """Run the layer on x (tokens, d_model), by its rule or by a forced assignment."""
    if assignment is None:
        return layer(x[:, None])[0][:, 0]
    routing = layer.router(x[:, None])
    return layer.compute(x[:, None], routing._replace(assignment=assignment[:, None]))[:, 0]


def check_layer(
    whole: MoE, split: MoE, shares: tuple[int, ...], assignment: Tensor | None, rank: int, group: dist.ProcessGroup
) -> Tensor:
    """Check outputs and all gradients against one process, and return this rank's output."""
    generator = torch.Generator().manual_seed(sum(shares))
    x, upstream = torch.randn(2, sum(shares), D_MODEL, generator=generator)
    all_x = x.clone().requires_grad_()
    my_x = mine(x, shares, rank).clone().requires_grad_()
    whole.zero_grad()
    split.zero_grad()
    expected = forward(whole, all_x, assignment)
    y = forward(split, my_x, None if assignment is None else mine(assignment, shares, rank))
    expected.backward(upstream)
    y.backward(mine(upstream, shares, rank))
    torch.testing.assert_close(y, mine(expected, shares, rank), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(my_x.grad, mine(all_x.grad, shares, rank), atol=1e-6, rtol=1e-5)
    assert_same(as_one_process(gradients(split), split, group), gradients(whole), atol=1e-6)
    return y.detach()


def check_any_assignment(rank: int, ranks: int, group: dist.ProcessGroup) -> None:
    """Any fanout, any empty expert, ranks with few tokens or none."""
    kinds = [{"gate_norm": "fanout"}, {"activation": "swiglu", "shared_experts": 0, "dispatch": "reference"}]
    for options, shares in itertools.product(kinds, SHARES[ranks]):
        whole = new_layer(**options)
        split = copy.deepcopy(whole)
        shard_experts(split, group)
        assert split.experts.up.shape == (EXPERTS // ranks, D_EXPERT, D_MODEL)
        for assignment in assignments(sum(shares), every=3).values():
            check_layer(whole, split, shares, assignment, rank, group)


def check_rules(rank: int, ranks: int, group: dist.ProcessGroup) -> None:
    """A split layer equals one process, in training with a pool over all ranks and at inference."""
    rules: list[Rule] = [
        ExpertThreshold(EXPERTS, 1, warmup_steps=0, capacity_slack=0.5),
        ExpertChoice(EXPERTS, 2, pool="global"),
        TokenChoice(EXPERTS, 3),
    ]
    for rule, shares in itertools.product(rules, SHARES[ranks][:2]):
        whole = new_layer(rule)
        split = copy.deepcopy(whole)
        shard_experts(split, group)
        split.router.group = group
        for training in (True, False):
            check_layer(whole.train(training), split.train(training), shares, None, rank, group)


def check_other_dtypes(rank: int, ranks: int, group: dist.ProcessGroup) -> None:
    """bfloat16 rows travel with their float32 gates unrounded; float64 rows are computed in float64."""
    whole = new_layer(shared_experts=0)
    split = copy.deepcopy(whole)
    shard_experts(split, group)
    x = torch.randn(5, 1, D_MODEL, generator=torch.Generator().manual_seed(rank))
    for dtype, atol in ((torch.bfloat16, 0.02), (torch.float64, 1e-12)):
        y, there = whole(x.to(dtype))[0], split(x.to(dtype))[0]
        assert there.dtype == dtype
        torch.testing.assert_close(there, y, atol=atol, rtol=0)
    seen = []
    split.experts.register_forward_pre_hook(lambda _, given: seen.append(given[1]))
    split(x.bfloat16())
    received = seen[0][seen[0] >= 0]
    everyone = [torch.empty(5, 1, D_MODEL) for _ in range(ranks)]
    dist.all_gather(everyone, x, group=group)
    sent = [whole.router(other.bfloat16()) for other in everyone]
    first = rank * EXPERTS // ranks
    gates = [routing.scores.sigmoid()[:, 0, first : first + EXPERTS // ranks] for routing in sent]
    masks = [routing.assignment[:, 0, first : first + EXPERTS // ranks] for routing in sent]
    assert torch.equal(received, torch.cat(gates)[torch.cat(masks)])


def check_nan(rank: int, group: dist.ProcessGroup) -> None:
    """Rows and gates that no expert reads reach nothing; those that are read reach their own rows alone."""
    split = new_layer(ExpertChoice(EXPERTS, 2, pool="batch"), shared_experts=0)
    shard_experts(split, group)
    x = torch.randn(8, D_MODEL, generator=torch.Generator().manual_seed(rank))
    assignment = assignments(8)["fanout 2"].clone()
    assignment[3] = False
    gates = torch.rand(8, EXPERTS)
    for training, row in itertools.product((True, False), (3, 4)):
        split.train(training)
        poisoned = x.clone()
        poisoned[row] = torch.nan
        clean = split.dispatch(x, gates, assignment, split.experts)
        found = split.dispatch(poisoned, gates.masked_fill(~assignment, torch.nan), assignment, split.experts)
        assert torch.equal(found[torch.arange(8) != row], clean[torch.arange(8) != row])
        assert found[row].isnan().all() if row == 4 else (found[row] == 0).all()


def check_refusals(rank: int, ranks: int, group: dist.ProcessGroup) -> None:
    """Every rank raises the same error before anything changes."""
    layer = new_layer(TokenChoice(EXPERTS + 1, 1))
    with pytest.raises(ValueError, match=f"num_experts={EXPERTS + 1} cannot be split over {ranks} ranks"):
        shard_experts(layer, group)
    assert type(layer.experts) is Experts
    layer = new_layer(ExpertChoice(EXPERTS, 1, pool="batch"))
    shard_experts(layer, group)
    with pytest.raises(ValueError, match="already split"):
        shard_experts(layer, group)


def check_communication(rank: int, group: dist.ProcessGroup) -> None:
    """At inference, routers do not communicate. The layer exchanges counts once, and rows once each way."""
    rules: list[Rule] = [
        ExpertThreshold(EXPERTS, 1),
        ExpertChoice(EXPERTS, 1, pool="global"),
        TokenChoice(EXPERTS, 1, balance="global_aux"),
    ]
    for rule in rules:
        layer = new_layer(rule)
        shard_experts(layer, group)
        layer.router.group = group
        x = torch.randn(8, 1, D_MODEL)
        for training in (True, False):
            layer.train(training)
            with Collectives() as routing, torch.no_grad():
                layer.router(x)
            assert bool(routing.names) == training
            with Collectives() as everything, torch.no_grad():
                layer(x)
            assert everything.names == routing.names + BY_COUNT


def main(rank: int, ranks: int, folder: Path) -> None:
    group = join(rank, ranks, folder)
    check_any_assignment(rank, ranks, group)
    check_rules(rank, ranks, group)
    check_other_dtypes(rank, ranks, group)
    check_nan(rank, group)
    check_communication(rank, group)
    if ranks == 2:
        check_refusals(rank, ranks, group)

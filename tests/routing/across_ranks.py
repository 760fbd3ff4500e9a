"""One rank of the tests across ranks, see `ranks.run_on_ranks`.

Every rank knows the scores of all, so that each checks its own part against the single-process result.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from expert_threshold.routing import ExpertChoice, ExpertThreshold, QuantileBalancing, Rule, TokenChoice
from expert_threshold.routing.selection import Cut, kth_largest, take
from ranks import Collectives, join, mine

EXPERTS = 3
SHARES = {2: [(7, 5), (0, 12), (1, 20)], 3: [(4, 4, 4), (1, 0, 9), (0, 0, 5)]}


def kinds_of_scores(tokens: int) -> dict[str, Tensor]:
    """Return scores (tokens, experts): distinct, tied within and across ranks, equal, or numbers with odd bits."""
    generator = torch.Generator().manual_seed(tokens)
    normal = torch.randn(tokens, EXPERTS, generator=generator)
    odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-45, -1e-45, 3.4e38, -3.4e38, 1.0, -1.0])
    return {
        "distinct": normal,
        "tied": normal.round(),
        "equal": torch.full_like(normal, -2.5),
        "odd": odd[torch.randint(len(odd), normal.shape, generator=generator)],
    }


def check_selection(shares: tuple[int, ...], rank: int, group: dist.ProcessGroup) -> None:
    """Each cut takes the tokens that a stable sort over all ranks puts first, for many ks in any order."""
    tokens = sum(shares)
    ks = [*range(tokens, -1, -2), *range(tokens % 2 == 0, tokens, 2), 0]
    for name, scores in kinds_of_scores(tokens).items():
        place = scores.argsort(dim=0, descending=True, stable=True).argsort(dim=0)
        cuts = kth_largest(mine(scores, shares, rank)[None], ks, group)
        for k, cut in zip(ks, cuts, strict=True):
            taken = take(mine(scores, shares, rank)[None], cut)[0]
            assert torch.equal(taken, mine(place, shares, rank) < k), (name, shares, k)
            best = scores.sort(dim=0, descending=True).values[k - 1] if k else torch.full((EXPERTS,), torch.inf)
            assert torch.equal(cut.score[0], best), (name, shares, k)


def check_radix(shares: tuple[int, ...], rank: int, group: dist.ProcessGroup) -> None:
    """The GPU's selection, in Triton's interpreter, makes the same cuts."""
    from expert_threshold.routing import radix

    scores = mine(kinds_of_scores(sum(shares))["tied"], shares, rank)[None]
    ks = [sum(shares) // 2, 1, 0, sum(shares), 3]
    found = zip(*radix.select(scores, ks, group), strict=True)
    for cut, (score, last) in zip(kth_largest(scores, ks, group), found, strict=True):
        assert torch.equal(cut.score, score), shares
        assert torch.equal(take(scores, cut), take(scores, Cut(score, last))), shares


def check_too_few_tokens(rank: int, group: dist.ProcessGroup) -> None:
    """All ranks refuse a pool with k = 0, and none hangs. An empty batch is allowed."""
    rule = ExpertThreshold(EXPERTS, warmup_steps=0)
    with pytest.raises(ValueError, match="pool of 1 tokens"):
        rule.route(torch.zeros(int(rank == 0), 1, EXPERTS), rule.init(), training=True, group=group)
    routing = rule.route(torch.zeros(0, 1, EXPERTS), rule.init(), training=True, group=group)
    assert routing.assignment.shape == (0, 1, EXPERTS)
    assert routing.observation.pools == 0


def check_bytes(rule: Rule, group: dist.ProcessGroup) -> None:
    """The bytes that a rule sends do not grow with the tokens."""

    def sent(tokens: int) -> tuple[list[str], int]:
        with Collectives() as collectives:
            rule.route(torch.randn(1, tokens, EXPERTS), rule.init(), training=True, group=group)
        assert collectives.bytes > 0 or not collectives.names
        return collectives.names, collectives.bytes

    assert sent(12) == sent(3000), rule


def main(rank: int, ranks: int, folder: Path) -> None:
    group = join(rank, ranks, folder)
    rules: list[Rule] = [
        ExpertChoice(EXPERTS, 1, pool="global"),
        ExpertChoice(EXPERTS, 1.25, pool="global"),
        ExpertThreshold(EXPERTS, 1, warmup_steps=0, decay=0.5),
        ExpertThreshold(EXPERTS, 1, warmup_steps=2, decay=0.5, capacity_slack=0.25),
        ExpertThreshold(EXPERTS, 1, warmup_steps=0, capacity_slack=None),
        TokenChoice(EXPERTS, 1, balance="global_aux"),
        TokenChoice(EXPERTS, 2, balance="loss_free"),
        QuantileBalancing(EXPERTS, 1, decay=0.5),
        QuantileBalancing(EXPERTS, 2, estimator="histogram"),
    ]
    for shares in SHARES[ranks]:
        check_selection(shares, rank, group)
        if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
            check_radix(shares, rank, group)
    for rule in rules:
        check_bytes(rule, group)
    check_too_few_tokens(rank, group)

"""One rank of the tests across ranks, see `ranks.run_on_ranks`: windows are shared out, the sums stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_loss import CONTEXT, RULES, make_model, text

from expert_threshold.data import Tokenizer
from expert_threshold.evaluation import Validation, evaluate
from expert_threshold.routing import ExpertChoice
from ranks import join


def assert_same(got: Validation, wanted: Validation) -> None:
    assert got.loss == pytest.approx(wanted.loss, rel=1e-6)
    assert got.bits_per_byte == pytest.approx(wanted.bits_per_byte, rel=1e-6)
    assert (got.tokens, got.bytes) == (wanted.tokens, wanted.bytes)
    torch.testing.assert_close(got.observations, wanted.observations)


def check_shares(tokenizer: Tokenizer, group: dist.ProcessGroup) -> None:
    """From less than one window to more than one for every rank, the last one not whole; and a budget of tokens."""
    for rule in RULES.values():
        model = make_model(tokenizer, rule)
        for count, batch_size in ((2, 1), (CONTEXT + 1, 64), (4 * CONTEXT + 1, 1), (11 * CONTEXT + 7, 2)):
            tokens = text(tokenizer, count)
            alone = evaluate(model, tokens, tokenizer)
            assert_same(evaluate(model, tokens, tokenizer, batch_size=batch_size, group=group), alone)
        some = {"max_tokens": 5 * CONTEXT - 3, "batch_size": 1}
        assert_same(evaluate(model, tokens, tokenizer, **some, group=group), evaluate(model, tokens, tokenizer, **some))


def check_training_pools(tokenizer: Tokenizer, ranks: int, group: dist.ProcessGroup) -> None:
    """Pools of one rank are those of one process, and a global pool is its larger batch; none is waited for in vain."""
    tokens = text(tokenizer, (4 * ranks + 1) * CONTEXT + 5)
    for pool, batch_size in (("sequence", 2), ("batch", 2), ("global", 2 * ranks)):
        model = make_model(tokenizer, ExpertChoice(4, 1, pool=pool))
        options = {"training_pools": True, "max_tokens": 4 * ranks * CONTEXT}
        alone = evaluate(model, tokens, tokenizer, batch_size=batch_size, **options)
        for _, moe in model.moe_layers():
            moe.router.group = group
        got = evaluate(model, tokens, tokenizer, batch_size=2, **options, group=group)
        assert (got.loss, got.tokens) == (pytest.approx(alone.loss, rel=1e-6), alone.tokens)
        for a, b in zip(got.observations, alone.observations, strict=True):
            assert torch.equal(a.load, b.load)


def main(rank: int, ranks: int, folder: Path) -> None:
    group = join(rank, ranks, folder)
    tokenizer = Tokenizer.train(["the cat sat on the mat; the hat of the cat: ünïcödé"] * 4, 270)
    check_shares(tokenizer, group)
    check_training_pools(tokenizer, ranks, group)

"""Batched scores equal one plain forward per sequence."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from cases import covering, small_model
from expert_threshold.model import GPT, Continuation, common_prefix, crop, score
from expert_threshold.routing import ExpertThreshold

CONTEXT = 48


@pytest.fixture(scope="module")
def model() -> GPT:
    sizes = {"vocab_size": 40, "context": CONTEXT, "layers": 2, "kv_heads": 1}
    return small_model(ExpertThreshold(4, 1, warmup_steps=0), steps=0, **sizes).train()


@pytest.fixture(scope="module")
def groups(model: GPT) -> list[list[Continuation]]:
    """Draw one to four sequences with a common prefix of random length; half of the continuations are the likeliest."""
    chance = random.Random(0)
    groups = []
    for _ in range(8):
        alike = chance.choices(range(40), k=chance.randint(1, 30))
        group = []
        for _ in range(chance.randint(1, 4)):
            tokens = alike + chance.choices(range(40), k=chance.randint(0, 12))
            start = len(tokens)
            for _ in range(chance.randint(1, 5)):
                with torch.no_grad():
                    likeliest = int(model.eval()(torch.tensor([tokens])).logits[0, -1].argmax())
                tokens = [*tokens, likeliest if chance.random() < 0.8 else chance.randrange(40)]
            group.append(Continuation(tokens, start))
        groups.append(group)
    return groups


@pytest.fixture(scope="module")
def plain(model: GPT, groups: list[list[Continuation]]) -> list[tuple[float, int, int]]:
    """The nats, the tokens and the misses of every continuation, from one forward each."""
    found = []
    for tokens, start in itertools.chain(*groups):
        with torch.no_grad():
            logits = model.eval()(torch.tensor([tokens])).logits[0, start - 1 : -1]
        wanted = torch.tensor(tokens[start:])
        nats = torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")
        found.append((float(nats), len(wanted), int((logits.argmax(1) != wanted).sum())))
    return found


@pytest.mark.parametrize(
    ("misses", "shared_prefix", "tokens_at_once"),
    covering(itertools.product([True, False], [1, 8, 10**9], [1, 100, 8192])),
)
def test_scores_are_those_of_plain_forwards(
    model: GPT, groups: list[list[Continuation]], plain: list[tuple[float, int, int]], misses: bool, shared_prefix: int,
    tokens_at_once: int,
) -> None:  # fmt: skip
    scores = score(model, groups, misses=misses, shared_prefix=shared_prefix, tokens_at_once=tokens_at_once)
    assert [len(scored) for scored in scores] == [len(group) for group in groups]
    for found, (nats, tokens, missed) in zip(itertools.chain(*scores), plain, strict=True):
        assert (found.nats, found.tokens) == (pytest.approx(nats, abs=1e-4), tokens)
        assert found.misses == (missed if misses else 0)
    assert 0 in {missed for *_, missed in plain}
    assert max(missed for *_, missed in plain) > 0


def test_the_common_prefix_of_a_group_is_computed_once(model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    group = [Continuation([*range(30), i, i], 30) for i in range(4)]
    forward, sizes = model.forward, []

    def note(tokens: torch.Tensor, *arguments: object, **options: object) -> object:
        sizes.append(tuple(tokens.shape))
        return forward(tokens, *arguments, **options)

    monkeypatch.setattr(model, "forward", note)
    score(model, [group, group], shared_prefix=8)
    assert sizes == [(2, 29), (8, 2)]


def test_no_continuation_costs_nothing_and_misses_nothing(model: GPT) -> None:
    assert score(model, [[Continuation([1, 2], 2)], []]) == [[(0.0, 0, 0)], []]


def test_a_sequence_longer_than_the_context_is_refused_and_the_mode_kept(model: GPT) -> None:
    model.train()
    with pytest.raises(ValueError, match=f"longer than the context of {CONTEXT}"):
        score(model, [[Continuation([1] * (CONTEXT + 2), 1)]])
    assert model.training
    score(model, [[Continuation([1] * (CONTEXT + 1), 1)]])
    assert model.training


def test_cropping_keeps_the_end_and_a_first_token_to_predict_from() -> None:
    assert crop(Continuation([1, 2, 3, 4, 5], 3), 5) == ([1, 2, 3, 4, 5], 3)
    assert crop(Continuation([1, 2, 3, 4, 5], 3), 4) == ([2, 3, 4, 5], 2)
    assert crop(Continuation([1, 2, 3, 4, 5], 3), 2) == ([4, 5], 1)


def test_the_common_prefix_is_that_of_all() -> None:
    assert common_prefix([[1, 2, 3], [1, 2, 4], [1, 2, 3, 5]]) == 2
    assert common_prefix([[1, 2], [1, 2, 3]]) == 2
    assert common_prefix([[2], [1]]) == 0
    assert common_prefix([[1, 2]]) == 2
    assert common_prefix([[], [1]]) == 0

"""Scores in batches are those of one plain forward for each sequence."""

from __future__ import annotations

import random

import pytest
import torch

from expert_threshold.model import GPT, Continuation, GPTConfig, common_prefix, crop, score
from expert_threshold.routing import ExpertThreshold

CONTEXT = 48


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    rule = ExpertThreshold(4, 1, warmup_steps=0)
    sizes = {"d_model": 32, "heads": 2, "kv_heads": 1, "d_expert": 16, "d_feed_forward": 32}
    model = GPT(GPTConfig.preset("tiny", vocab_size=40, context=CONTEXT, rule=rule, **sizes))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return model


def some_groups(model: GPT, count: int) -> list[list[Continuation]]:
    """Draw one to four sequences with a common prefix of random length; half of the continuations are the likeliest."""
    chance = random.Random(0)
    groups = []
    for _ in range(count):
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


@pytest.mark.parametrize("misses", [True, False])
@pytest.mark.parametrize("shared_prefix", [1, 8, 10**9])
@pytest.mark.parametrize("tokens_at_once", [1, 100, 8192])
def test_scores_are_those_of_plain_forwards(model: GPT, misses: bool, shared_prefix: int, tokens_at_once: int) -> None:
    groups = some_groups(model, 20)
    options = {"misses": misses, "shared_prefix": shared_prefix, "tokens_at_once": tokens_at_once}
    missed = []
    for group, scores in zip(groups, score(model, groups, **options), strict=True):
        for (tokens, start), found in zip(group, scores, strict=True):
            with torch.no_grad():
                logits = model.eval()(torch.tensor([tokens])).logits[0, start - 1 : -1]
            wanted = torch.tensor(tokens[start:])
            nats = torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")
            assert found.nats == pytest.approx(float(nats), abs=1e-4)
            assert found.tokens == len(wanted)
            missed.append(int((logits.argmax(1) != wanted).sum()))
            assert found.misses == (missed[-1] if misses else 0)
    assert 0 in missed
    assert max(missed) > 0


def test_what_a_group_begins_with_is_computed_once(model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
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

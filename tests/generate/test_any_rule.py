"""Rules with copying slots or that depend on earlier tokens: the full forward, the cache and the decoder agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cases import PIECES, small_model
from expert_threshold.generate.decoder import Decoder
from expert_threshold.routing import NullSlots, Observation, Routing, Rule, SeqTopK, observe
from expert_threshold.testing import check_rule


class Nothing(NamedTuple):
    """A rule's state without fields."""


@dataclass(frozen=True)
class LooksBack(Rule):
    """A token goes to every expert whose score exceeds the mean of the scores so far in its sequence."""

    num_experts: int = 4
    experts_per_token: float = 0.8

    def init(self) -> Nothing:
        return Nothing()

    def route(self, scores: Tensor, state: Any, *, training: bool, group: dist.ProcessGroup | None = None) -> Routing:
        count = torch.arange(1, scores.shape[1] + 1, device=scores.device)[:, None]
        assignment = (scores > scores.detach().cumsum(1) / count) & (count > 1)
        gates = scores.sigmoid()
        observation = observe(scores, assignment, gates)
        return Routing(scores=scores, gates=gates, assignment=assignment, observation=observation)

    def update(self, state: Any, observation: Observation) -> Nothing:
        return Nothing()


def test_a_rule_that_answers_no_question_keeps_the_contract() -> None:
    check_rule(LooksBack(), ranks=False)


RULES = [NullSlots(4, 1, null="copy"), LooksBack(), SeqTopK(4, 1.5), SeqTopK(4, 2, gate="softmax", null_scores=2)]


@pytest.mark.parametrize("rule", RULES)
@torch.no_grad()
def test_cached_logits_are_those_of_the_whole_forward(rule: Rule) -> None:
    model = small_model(rule)
    tokens = torch.randint(270, (2, 24), generator=torch.Generator().manual_seed(1))
    expected = model(tokens).logits
    cache = model.new_cache(2, 24)
    pieces = [model(part, cache=cache).logits for part in (tokens[:, :9], tokens[:, 9:10], tokens[:, 10:])]
    torch.testing.assert_close(torch.cat(pieces, 1), expected)
    copies = model.new_cache(2, 9)
    model(tokens[:, :9], cache=copies)
    rest = model(tokens[[1, 0, 1], 9:], cache=copies.copies([1, 0, 1], 24)).logits
    torch.testing.assert_close(rest, expected[[1, 0, 1], 9:])


@pytest.mark.parametrize("rule", RULES)
@torch.no_grad()
def test_a_new_sequence_is_decoded_beside_one_that_has_begun(rule: Rule) -> None:
    model, tokens = small_model(rule), torch.arange(10)[None]
    decoder = Decoder(model, 2, 24)
    decoder.open(0)
    decoder.read(0, tokens[0, :9].tolist())
    decoder.open(1)
    decoded = decoder.step({0: 9, 1: 5})
    expected = torch.stack([model(tokens).logits[0, -1], model(torch.tensor([[5]])).logits[0, -1]])
    torch.testing.assert_close(decoded.logits, expected)


@torch.no_grad()
def test_a_forward_that_fails_leaves_the_cache_as_it_was() -> None:
    model = small_model(LooksBack(), **PIECES["all of them"])
    tokens = torch.randint(270, (2, 12), generator=torch.Generator().manual_seed(1))
    cache = model.new_cache(2, 12)
    model(tokens[:, :5], cache=cache)
    broken = mock.patch.object(model.blocks[-1].attention, "forward", side_effect=RuntimeError)
    with broken, pytest.raises(RuntimeError):
        model(tokens[:, :3], cache=cache)
    torch.testing.assert_close(model(tokens[:, 5:], cache=cache).logits, model(tokens).logits[:, 5:])

"""A rule that uses the freedoms of the contract works wherever rules are used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from expert_threshold.model import GPT, GPTConfig
from expert_threshold.moe import Router, RoutingHistory
from expert_threshold.moe.follow import _nothing_seen
from expert_threshold.routing import Observation, Routing, Rule, TokenChoice, observe
from expert_threshold.routing.token_choice import BiasState
from expert_threshold.testing import check_rule
from expert_threshold.train import TrainConfig
from expert_threshold.train.checks import require_pools_fit
from expert_threshold.train.state import step_values


class Clock(NamedTuple):
    at: Tensor  # (1,) float32, optimizer steps


@dataclass(frozen=True)
class Timed(TokenChoice):
    """Token choice whose state comes from NumPy, is reported as a metric, and reduces scores over each sequence."""

    def init(self) -> Any:
        return Clock(torch.from_numpy(np.zeros(1, np.float32)))

    def route(self, scores: Tensor, state: Any, *, training: bool, group: dist.ProcessGroup | None = None) -> Routing:
        scores.detach().amax(1)
        bias = state.at.new_zeros(self.num_experts)
        return super().route(scores, BiasState(bias), training=training, group=group)

    def update(self, state: Any, observation: Observation) -> Any:
        return Clock(state.at + (observation.tokens > 0))

    def biased_top_k(self, state: Any) -> None:
        return None

    def describe(self, state: Any) -> dict[str, Tensor]:
        return {}

    def measure(self, state: Any, observation: Observation) -> dict[str, Tensor]:
        return {"at": state.at}


class Summed(TokenChoice):
    """Token choice with a sum of its own."""

    def route(self, scores: Tensor, state: Any, *, training: bool, group: dist.ProcessGroup | None = None) -> Routing:
        routing = super().route(scores, state, training=training, group=group)
        best = scores.detach().amax(-1).sum()
        return routing._replace(observation=observe(scores, routing.assignment, routing.gates, best=best))


def test_it_keeps_the_contract() -> None:
    check_rule(Timed(4), ranks=False)


@torch.no_grad()
def test_sequences_with_and_without_a_past_are_routed_together() -> None:
    """Regression: the observation of the rule's own sums could not be added to that of a row with a past."""
    router, x = Router(8, Summed(4)).eval(), torch.randn(2, 5, 8)
    whole, past = router(x), RoutingHistory(scores=router.score(x[:1, :3])[0])
    found = router(x[:, 3:], [past, RoutingHistory()])
    assert torch.equal(found.assignment, whole.assignment[:, 3:])
    assert found.observation.tokens == 4


def test_a_metric_that_returns_the_state_has_its_value_before_the_update() -> None:
    """Regression: the metric shared memory with the state, which the update changed before it was read."""
    model = GPT(GPTConfig.preset("tiny", rule=Timed(4), layers=2))
    observations = model(torch.randint(256, (2, 8))).observations
    values = step_values(model, observations)
    model.update_rules(observations)
    assert values["1.at"] == 0
    assert model.blocks[1].moe.router.state.at == 1  # type: ignore[union-attr, operator]


@dataclass(frozen=True)
class Looking(Timed):
    """A rule that reads the values of its scores, in one of three ways."""

    way: int = 0

    def route(self, scores: Tensor, state: Any, *, training: bool, group: dist.ProcessGroup | None = None) -> Routing:
        detached = scores.detach().flatten()
        (lambda: bool(detached.max() > 0), detached.numpy, lambda: torch.bincount(detached.long().abs()))[self.way]()
        return super().route(scores, state, training=training, group=group)


@pytest.mark.parametrize("rule", [Timed(4), Looking(4), Looking(4, way=1), Looking(4, way=2)], ids=str)
def test_the_check_of_pools_accepts_rules_that_read_their_scores(rule: Rule) -> None:
    require_pools_fit(GPTConfig.preset("tiny", rule=rule), TrainConfig())


def test_a_rank_that_saw_nothing_observes_nothing() -> None:
    """Regression: it routed sequences of length 0, over which a maximum is undefined."""
    moe = GPT(GPTConfig.preset("tiny", rule=Timed(4))).moe_layers()[0][1]
    assert _nothing_seen(moe.router).tokens == 0

"""The length of a run follows from the speed of the machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from expert_threshold.config import resolve
from expert_threshold.train import pace, train_step
from expert_threshold.train.budget import SHARE_OF_STEPS


def test_tokens_are_those_of_the_steps_that_fit_into_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve("tiny", {"train.batch_size": 4, "train.accumulation": 2, "train.steps": 20})
    config = replace(config, train=replace(config.train, activation_checkpointing=True))
    seconds = lambda state: train_step(state) and 0.5 * state.model.activation_checkpointing  # noqa: E731
    monkeypatch.setattr(pace, "_seconds_of_step", seconds)
    torch.manual_seed(0)
    random = torch.get_rng_state()
    tokens = pace.tokens_within(100, config)
    assert tokens == 200 * SHARE_OF_STEPS * 4 * 2 * config.model.context
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(("steps", "seconds", "at_least"), [(1, 60, 1), (100, 1e-9, 4 * 128)])
def test_a_run_shorter_than_the_measurement_is_measured_and_no_time_at_all_is_one_step(
    steps: int, seconds: float, at_least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`et sweep --steps 2` failed on an assertion of the learning rate's schedule."""
    monkeypatch.setattr(pace, "SECONDS", 0)
    config = resolve("tiny", {"train.batch_size": 4, "train.steps": steps, "train.eval_every": 1})
    tokens = pace.tokens_within(seconds, config)
    assert tokens >= at_least
    assert seconds == 60 or tokens == at_least

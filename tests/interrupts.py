"""Ctrl-C at a chosen step, for tests of what is lost by it and what is not."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from expert_threshold.train import loop
from expert_threshold.train.state import TrainState


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in that step, counted over all runs."""
    train_step, made = loop.train_step, 0

    def interrupted(state: TrainState, status: Any) -> bool:
        nonlocal made
        made += 1
        if made == step:
            signal.raise_signal(signal.SIGINT)
        return train_step(state, status)

    monkeypatch.setattr(loop, "train_step", interrupted)

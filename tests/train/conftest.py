"""A tiny run: seconds of training on a few kilobytes of text."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from cases import RULES, small_config, write_text
from expert_threshold.data import DataConfig
from expert_threshold.model import GPT, GPTConfig, Output
from expert_threshold.optim import OptimConfig
from expert_threshold.routing import Rule
from expert_threshold.runs import RunFolder
from expert_threshold.train import RunConfig, TrainConfig, TrainResult, train


def tiny(rule: Rule | None = RULES["expert_threshold"], **changes: Any) -> GPTConfig:
    return small_config(rule, **({"vocab_size": 300, "context": 16, "layers": 2} | changes))


@pytest.fixture(autouse=True)
def one_thread(threads: None) -> None:
    torch.set_num_threads(1)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    sentence = "the model reads text and learns which expert is to see what token of it next"
    return write_text(tmp_path / "corpus.jsonl", sentence, documents=40, words=32)


def assert_same_bytes(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        same = a[name].numpy().tobytes() == b[name].numpy().tobytes()
        assert same, name  # pytest would show how long bytes differ, for minutes where CI is set


Start = Callable[..., TrainResult]


@pytest.fixture
def start(tmp_path: Path, corpus: Path) -> Start:
    """Trains the run `name`, for 8 steps of 2 micro-batches unless told otherwise."""
    intervals = {"log_every": 3, "eval_every": 4, "eval_tokens": 64, "checkpoint_every": 4}
    usual = TrainConfig(steps=8, batch_size=2, accumulation=2, threads=1, **intervals)

    def start(
        name: str = "run",
        model: GPTConfig | None = None,
        optim: OptimConfig = OptimConfig(),  # noqa: B008  a frozen record
        **options: Any,
    ) -> TrainResult:
        """Options of TrainConfig and DataConfig go there, all others to `train`."""
        changes = {key: options.pop(key) for key in list(options) if key in TrainConfig.__dataclass_fields__}
        data = {key: options.pop(key) for key in list(options) if key in DataConfig.__dataclass_fields__}
        folder = (RunFolder.open if options.get("resume") else RunFolder.create)(tmp_path / name)
        config = replace(usual, **changes)
        run = RunConfig(model or tiny(), DataConfig(**{"source": str(corpus)} | data), optim, config)
        return train(folder, run, **options)

    return start


class Plain:
    """A console that is no terminal, and what was printed on it."""

    def __init__(self, **options: Any) -> None:
        self._file = io.StringIO()
        self.console = Console(file=self._file, **options)

    def text(self) -> str:
        return self._file.getvalue()


@pytest.fixture
def plain() -> Plain:
    return Plain()


def spoil(
    monkeypatch: pytest.MonkeyPatch, numbers: Collection[int], value: float = math.nan, what: str = "loss"
) -> None:
    """Spoil the loss of these forwards in training, counted from 0, or its gradient or an expert's scores."""
    forward, count = GPT.forward, itertools.count()

    def spoiled(model: GPT, *args: Tensor) -> Output:
        output = forward(model, *args)
        if not (model.training and next(count) in numbers):
            return output
        if what == "scores":
            output.observations[0].score_sum[1] = value
        if what == "gradient":
            output.loss.register_hook(lambda gradient: gradient * value)
        return output._replace(loss=output.loss * value) if what == "loss" else output

    monkeypatch.setattr(GPT, "forward", spoiled)

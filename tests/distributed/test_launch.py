"""The launch of processes by `et train --nproc`."""

from __future__ import annotations

import logging
import signal
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.agent.server import api as agent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.launcher import api

from cases import write_text
from expert_threshold.cli import main
from expert_threshold.distributed import launch


def test_a_signal_to_the_launcher_is_an_exit_code_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[Any] = []

    def stopped(config: Any, *_: object) -> object:
        configs.append(config)

        def run(*_: object) -> None:
            logging.getLogger(agent.__name__).warning("Received a death signal")
            raise SignalException("stopped", signal.SIGINT)

        return run

    said = BufferingHandler(100)
    monkeypatch.setattr(logging.getLogger("torch"), "handlers", [said])
    monkeypatch.setattr(logging.getLogger("torch.distributed.elastic"), "propagate", True)
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    monkeypatch.setattr(api, "elastic_launch", stopped)
    assert launch(["train"], 2) == 128 + signal.SIGINT
    assert not said.buffer
    [config] = configs
    assert config.local_addr == "localhost"  # a machine's own name may not resolve, after minutes
    assert {"SIGHUP", "SIGUSR1"} <= set(config.signals_to_handle.split(","))
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)  # by nohup
    launch(["train"], 2)
    assert "SIGHUP" not in configs[1].signals_to_handle


def test_one_process_trains_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It was launched, found itself alone, and launched the next."""
    monkeypatch.setattr("expert_threshold.cli.train.launch", lambda *_: pytest.fail("launched"))
    text = write_text(tmp_path / "corpus.jsonl")
    small = "--steps 1 --vocab-size 270 --context 16 --batch-size 2 --eval-every none --threads 1"
    assert main(f"train tiny --nproc 1 {small} --data {text} --out {tmp_path / 'run'}".split()) == 0

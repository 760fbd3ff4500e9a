"""The launch of processes by `et train --nproc`."""

from __future__ import annotations

import signal

import pytest
import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.launcher import api

from expert_threshold.train.parallel import launch


def test_a_signal_to_the_launcher_is_an_exit_code_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> object:
        def run(*_: object) -> None:
            raise SignalException("stopped", signal.SIGINT)

        return run

    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    monkeypatch.setattr(api, "elastic_launch", stopped)
    assert launch(["train"], 2) == 128 + signal.SIGINT

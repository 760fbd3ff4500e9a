"""What training asks and changes of the process it runs in."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from expert_threshold import native
from expert_threshold.cli import main
from expert_threshold.runs import RunFolder
from expert_threshold.train.device import kernels_run, objects_at_rest

CPU = torch.device("cpu")


def test_objects_rest_while_a_run_trains_and_are_garbage_again_after() -> None:
    before = gc.get_freeze_count()
    with objects_at_rest():
        assert gc.get_freeze_count() > before
    assert gc.get_freeze_count() == before


def test_what_others_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        with objects_at_rest():
            pass
        assert gc.get_freeze_count() == before
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_record_of_a_run_says_whether_kernels_ran(tmp_path: Path, dtype: str) -> None:
    arguments = ["train", "tiny", "--steps", "1", "--eval-tokens", "256", "--sample-every", "9", "--dtype", dtype]
    assert main([*arguments, "--out", str(tmp_path / "run")]) == 0
    assert RunFolder.open(tmp_path / "run").config["kernels"] == (dtype == "bfloat16" and native.available())


def test_kernels_run_on_processors_in_bfloat16_unless_they_are_off() -> None:
    assert kernels_run(CPU, torch.bfloat16) == native.available()
    assert not kernels_run(CPU, torch.float32)
    assert not kernels_run(torch.device("cuda"), torch.bfloat16)
    with native.off():
        assert not kernels_run(CPU, torch.bfloat16)

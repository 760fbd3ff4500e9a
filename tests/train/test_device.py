"""The settings of the process that training changes."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import et
from expert_threshold.kernels import cpu
from expert_threshold.runs import RunFolder
from expert_threshold.train.device import gc_frozen, kernels_run
from expert_threshold.train.loop import to_device
from rounding import without_kernels

CPU = torch.device("cpu")


def test_objects_rest_while_a_run_trains_and_are_garbage_again_after_unless_others_froze_them() -> None:
    gc.unfreeze()  # those of pytest
    try:
        with gc_frozen():
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()  # else every run of every later test would look through them
    before = gc.get_freeze_count()
    with gc_frozen():
        pass
    assert gc.get_freeze_count() > 0.9 * before  # some of them may be freed


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_run_says_and_records_whether_kernels_ran(tmp_path: Path, corpus: Path, dtype: str, capsys: Any) -> None:
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    small = f"--steps 1 --sample-every 9 --vocab-size 300 --batch-size 2 --context 16 --dtype {dtype}"
    assert et(*f"train tiny --data {corpus} --out {tmp_path / 'run'} {small}".split()) == 0
    ran = RunFolder.open(tmp_path / "run").config["kernels"]
    assert ran == (dtype == "bfloat16" and cpu.available())
    captured = capsys.readouterr()
    assert (captured.out + captured.err).count("kernels are off: ") == (not ran)
    # Else cuBLAS may add up parts of weight gradients in bfloat16.
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


def test_a_batch_on_its_device_is_not_copied() -> None:
    x = torch.arange(3)
    assert to_device(x, torch.device("cpu")) is x


def test_kernels_run_on_processors_in_bfloat16_unless_they_are_off() -> None:
    assert kernels_run(CPU, torch.bfloat16) == cpu.available()
    assert not kernels_run(CPU, torch.float32)
    assert not kernels_run(torch.device("cuda"), torch.bfloat16)
    with without_kernels():
        assert not kernels_run(CPU, torch.bfloat16)

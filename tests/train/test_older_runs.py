"""Runs that were begun before sketches of scores were kept, and some options were there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from expert_threshold.cli import main
from expert_threshold.runs import RunFolder
from small_run import write_text


def et(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_a_run_older_than_sketches_resumes_to_the_same_weights_and_begins_a_sketch(tmp_path: Path) -> None:
    text = write_text(tmp_path / "corpus.jsonl")
    small = ["--data", text, "--vocab-size", 270, "--context", 32, "--batch-size", 4, "--threads", 1]
    small += ["--dtype", "float32", "--steps", 6, "--checkpoint-every", 4, "--log-every", 3, "--eval-every", "none"]
    small += ["--estimator", "mean"]
    assert et("train", "tiny", *small, "--out", tmp_path / "whole") == 0
    old = Path(shutil.copytree(tmp_path / "whole", tmp_path / "old"))
    run = RunFolder.open(old)
    saved = run.load_checkpoint(4)
    assert saved.tensors["interval"]  # of the step since the last line of metrics
    tensors = {
        part: {name: value for name, value in named.items() if "sketch" not in name}
        for part, named in saved.tensors.items()
    }
    shutil.rmtree(old / "checkpoints")
    run.save_checkpoint(4, tensors, saved.state)
    config = json.loads((old / "config.json").read_text())
    for section, newer in (
        (config["model"]["rule"], ("estimator",)),
        (config["train"], ("expert_parallel", "shard", "timeout")),
    ):
        for option in newer:
            del section[option]
    (old / "config.json").write_text(json.dumps(config))
    assert et("train", "--resume", old) == 0
    whole, resumed = (RunFolder.open(tmp_path / name).load_checkpoint(6).tensors["model"] for name in ("whole", "old"))
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]) == ("sketch" not in name), name
    assert et("generate", old, "--rate", 2, "--max-tokens", 4) == 0

"""Tiny runs of every kind, for the tests of figures and pages."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from commands import write_lines
from expert_threshold.data import DataConfig
from expert_threshold.model import GPTConfig
from expert_threshold.optim import OptimConfig
from expert_threshold.routing import ExpertChoice, ExpertThreshold, Rule, TokenChoice
from expert_threshold.runs import RunFolder
from expert_threshold.train import RunConfig, TrainConfig, train

ET = ExpertThreshold(num_experts=4, warmup_steps=3, decay=0.5)
# The folder -> the rule, other options, the seed; and what figures call the method.
RUNS: dict[str, tuple[Rule | None, dict[str, Any], int, str]] = {
    "dense": (None, {}, 0, "dense"),
    "tc": (TokenChoice(4), {}, 0, "TC"),
    "tc-free": (TokenChoice(4, balance="loss_free"), {}, 0, "TC loss-free"),
    "ec-batch": (ExpertChoice(4), {}, 0, "EC 64"),
    "ec-sequence": (ExpertChoice(4, pool="sequence"), {}, 0, "EC 16"),
    "et": (ET, {}, 0, "ET"),
    "et-1": (ET, {}, 1, "ET"),
    "et-cold": (replace(ET, warmup_steps=0), {}, 0, "ET no warmup"),
    "et-norm": (ET, {"gate_norm": "fanout"}, 0, "ET fanout norm"),
    "et-unshared": (replace(ET, experts_per_token=2), {"shared_experts": 0}, 0, "ET no shared expert"),
}
SAMPLE = "--- <script>alert('&amp;')</script>\x00\x0c after http://example.org\n"


def make_runs(folder: Path) -> Path:
    """Train runs of eight steps with two layers of experts in `folder`, write a few lines of each domain; return it."""
    chance, words = random.Random(0), ["the", "model", "reads", "“text”", "and\n", "\tlearns"]
    documents = [{"text": " ".join(chance.choices(words, k=60))} for _ in range(300)]
    write_lines(folder / "corpus.jsonl", documents)
    write_lines(folder / "math.jsonl", [{"question": f"{n} + {n}?", "answer": f"#### {2 * n}"} for n in range(200)])
    code = [{"prompt": f"def f{n}():\n", "canonical_solution": f"    return {n}\n"} for n in range(200)]
    write_lines(folder / "code.jsonl", code)
    write_lines(folder / "prose.jsonl", documents[:9])
    intervals = {"log_every": 1, "eval_every": 2, "eval_tokens": 128, "checkpoint_every": 4, "sample_every": 4}
    threads = torch.get_num_threads()
    for name, (rule, options, seed, _) in RUNS.items():
        sizes = {"d_model": 32, "heads": 2, "kv_heads": 2, "d_expert": 32, "d_feed_forward": 64, "layers": 3}
        run = RunConfig(
            GPTConfig.preset("tiny", rule=rule, vocab_size=280, context=16, **sizes, **options),
            DataConfig(source=str(folder / "corpus.jsonl")),
            OptimConfig(),
            TrainConfig(steps=8, batch_size=4, seed=seed, threads=1, device="cpu", **intervals),
        )
        sample = lambda model, tokenizer, step: f"step {step} {SAMPLE}"  # noqa: E731
        train(RunFolder.create(folder / name), run, sample=sample)
    torch.set_num_threads(threads)
    return folder


def copy_run(
    run: Path, to: Path, change: Callable[[Any], Any] = lambda record: record, **sections: dict[str, Any]
) -> RunFolder:
    """Copy a run. change: takes a record of its metrics, returns it or None. sections: options of its configuration."""
    config = json.loads((shutil.copytree(run, to) / "config.json").read_text())
    for section, options in sections.items():
        config[section] |= options
    (to / "config.json").write_text(json.dumps(config))
    folder = RunFolder.open(to)
    records = [changed for record in folder.metrics.read() if (changed := change(record)) is not None]
    folder.metrics.path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder

"""A run folder that no training made: random weights, and rules that have seen a few batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from expert_threshold.data import Tokenizer, open_source
from expert_threshold.model import GPT, GPTConfig
from expert_threshold.routing import ExpertChoice, ExpertThreshold, Rule, TokenChoice
from expert_threshold.runs import RunFolder

RULES: dict[str, Rule | None] = {
    "dense": None,
    "token_choice": TokenChoice(4, 2),
    "loss_free": TokenChoice(4, 1, balance="loss_free"),
    "expert_choice": ExpertChoice(4, 1, pool="batch"),
    "expert_threshold": ExpertThreshold(4, 1, warmup_steps=2),
}
TEXT = "the cat sat on the mat; the hat of the cat\n"


def small_tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT * 4], 270)


def small_model(rule: Rule | None = RULES["expert_threshold"], *, seed: int = 0, **changes: Any) -> GPT:
    """Return a small model in evaluation mode. changes: options of GPTConfig."""
    torch.manual_seed(seed)
    sizes = {"context": 64, "layers": 3, "d_model": 32, "heads": 2, "kv_heads": 2, "d_expert": 16}
    model = GPT(GPTConfig(**({"vocab_size": 270, "d_feed_forward": 64, "rule": rule} | sizes | changes)))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    for _ in range(4):
        model.update_rules(model(torch.randint(model.config.vocab_size, (2, 32))).observations)
    return model.eval()


def write_text(path: Path) -> Path:
    """A corpus in a .jsonl file, of some 9,000 tokens of `small_tokenizer`, a tenth of them for validation."""
    words = TEXT.split()
    documents = [" ".join(words[(i * j) % len(words)] for j in range(100)) for i in range(1, 31)]
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return path


def write_run(path: Path, model: GPT, step: int = 4, text: Path | None = None) -> RunFolder:
    """The model's weights as a checkpoint, with a validation of it in the metrics; text: what it was trained on."""
    run = RunFolder.create(path)
    train = {"batch_size": 2, "accumulation": 1}
    corpus = {"name": "/somewhere/corpus.jsonl", "hash": "0" * 64, "bytes": 1}
    if text is not None:
        opened = open_source(str(text))
        corpus = {"name": str(text), "hash": opened.hash, "bytes": opened.bytes}
    run.write_config(
        {"model": model.config.to_dict(), "train": train, "data": {"source": corpus["name"]}, "corpus": corpus}
    )
    small_tokenizer().save(run.tokenizer_path)
    run.metrics.append({"step": step, "split": "validation", "loss": 5.25, "bits_per_byte": 3.5})
    run.save_checkpoint(step, {"model": model.state_dict()}, {})
    return run

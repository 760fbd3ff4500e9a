"""Checks options before any time-consuming work starts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from ..data import Corpus
from ..data.tokenizer import require_vocab_size
from ..distributed import local_batch, mesh_sizes
from ..files import corrupted_file_error
from ..model import GPTConfig
from ..moe import BACKENDS, Experts, Router
from ..moe.sharding import require_even_split
from ..runs import Checkpoint, RunFolder
from .budget import Budget
from .config import TrainConfig
from .device import pick_device, pick_dtype
from .log import require_tracker

SAME_COMMAND = "start the same command with the same version on every rank"

# Options that may change when a run is resumed, because they do not affect what it learns.
FREE_ON_RESUME = {
    "device", "activation_checkpointing", "compile", "log_every", "eval_every", "eval_tokens", "sample_every",
    "checkpoint_every", "keep_checkpoints", "track", "threads", "core_every", "core_max_per_task",
    "expert_parallel", "shard", "timeout",
}  # fmt: skip


def require_trainable(model: GPTConfig, config: TrainConfig, ranks: int = 1) -> None:
    """Raise ValueError if the options cannot work with any text, or on this machine with this number of ranks."""
    device = pick_device(config.device)
    x = torch.zeros(0, model.d_model, dtype=pick_dtype(config.dtype, device), device=device)
    with torch.device("meta"):
        experts = Experts(1, model.d_model, model.d_expert, model.activation)
    BACKENDS[model.dispatch].require(x, experts)
    if config.threads is not None:
        require_few(config.threads)
    require_split(model, config, ranks)
    require_vocab_size(model.vocab_size)
    require_pools_fit(model, config, ranks)
    require_tracker(config.track)


def require_split(model: GPTConfig, config: TrainConfig, ranks: int) -> None:
    """Raise ValueError unless `expert_parallel` divides both the number of ranks and the number of experts."""
    mesh_sizes(ranks, config.expert_parallel)
    if model.rule is not None:
        require_even_split(model.rule.num_experts, config.expert_parallel)


def require_few(threads: int) -> None:
    """Raise ValueError for far more threads than cores. The system kills processes with too many threads."""
    most = max(64, 4 * (os.cpu_count() or 1))
    if threads > most:
        raise ValueError(f"threads={threads} is more than this machine can use; use at most {most}")


def require_pools_fit(model: GPTConfig, config: TrainConfig, ranks: int = 1) -> None:
    """Raise ValueError if the rule rejects the micro-batch because k = 0 or because the pool does not divide it."""
    local = local_batch(config.batch_size, config.accumulation, model.rule, ranks)
    if model.rule is not None and model.dense_layers < model.layers:
        try:
            with torch.device("meta"):  # nothing is allocated, since only shapes matter
                scores = torch.zeros(local.pooled, model.context, model.rule.num_scores)
                model.rule.route(scores, Router(1, model.rule).state, training=True)
        except (RuntimeError, TypeError) as error:
            if "meta" not in str(error).lower():  # rules may read their scores, which have no values on this device
                raise


def by_path(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in config.json, keyed by path. The options for the text are not included."""
    return {f"{part}.{name}": v for part in ("model", "rule", "optim", "train") for name, v in record[part].items()}


def decisive(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in config.json that determine what a run learns, except for the number of steps.

    The text is compared by its hash.
    """
    free = {f"train.{name}" for name in (*FREE_ON_RESUME, "steps")}
    options = {path: value for path, value in by_path(record).items() if path not in free}
    kept: dict[str, Any] = json.loads(json.dumps(options))
    return kept


def require_unchanged(folder: RunFolder, record: Mapping[str, Any], budget: Budget, saved: Checkpoint) -> None:
    """Raise ValueError if any options differ from the checkpoint's. The error names all of them.

    record: the content of config.json, updated with the given options. budget: the budget in config.json.
    """
    options = decisive(record)
    with corrupted_file_error(f"checkpoint of step {saved.step}", "remove it to resume from an earlier one"):
        before, decided, _ = saved.state["options"], saved.state["decisions"], saved.state["elapsed"]
    differing = [
        f"{name}={options.get(name)!r} differs from {before.get(name)!r}"
        for name in options | before
        if options.get(name) != before.get(name)
    ]
    if [list(decision) for decision in budget.decisions[: len(decided)]] != decided:
        differing.append(f"train.steps={budget.decisions[-1].steps} differs from {decided[-1][1]}")
    if differing:
        raise ValueError(
            f"{'; '.join(differing)}, as used for step {saved.step} of {folder.path}; restore it in config.json, "
            f"use --steps to train longer, or start another run with --init-from {folder.path}"
        )


def require_same_corpus(folder: RunFolder, corpus: Corpus) -> None:
    """Raise ValueError if the text differs from the one that the run started with."""
    before = folder.section("corpus").get("hash")
    if corpus.hash != before:
        raise ValueError(
            f"source={corpus.name!r} has changed since {folder.path} started (sha256 {corpus.hash[:12]}…, was "
            f"{str(before)[:12]}…); restore the text, give its path with --data, "
            f"or start another run with --init-from {folder.path}"
        )

"""Training in earnest: small runs of every method with the same seeds, text and budget, in folders that `et` reads.

Runs lie in FOLDER/training/METHOD/seed_N. A run that its time cuts off is saved, and goes on in the next run.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .setting import Case, NotRunError, OutOfTimeError, Row, Setting

PRESET = "d6"
TOKENS = 400 * 128 * 1024  # of d6's steps: 52 million
SEEDS = 3
POOL = 8  # sequences that compete for an expert, in the middle one of expert choice's three pools
SAVING = 12.0  # seconds that a run needs to stop
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "expert_threshold": ("expert_threshold", {}),
    "token_choice": ("token_choice", {"balance": "none"}),
    "expert_choice_batch": ("expert_choice", {"pool": "batch"}),
    "quantile_balancing": ("quantile_balancing", {}),
    "expert_choice_sequence": ("expert_choice", {"pool": "sequence"}),
    f"expert_choice_{POOL}_sequences": ("expert_choice", {}),  # the pool is in tokens, see `rule_options`
    "token_choice_loss_free": ("token_choice", {"balance": "loss_free"}),
}
"""Rules with their options by the method's name, in the order of what is worth most."""


WORDS = ("the", "model", "reads", "text", "and", "learns", "which", "expert", "is", "to", "see", "what", "token")


def toy_shards(folder: Path, documents: int = 60) -> Path:
    """Write two Parquet shards of short documents, the second for validation; returns their folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    chance = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(2):
        texts = [" ".join(chance.choices(WORDS, k=chance.randint(5, 60))) for _ in range(documents)]
        pq.write_table(pa.table({"text": texts}), folder / f"shard_{shard:05}.parquet")
    return folder


def cases(setting: Setting) -> Iterator[Case]:
    """Yield all methods of one seed before the next; the text is tokenized before the first run."""
    yield Case("tokens", lambda: tokenized(setting), 20)
    for seed in range(setting.pick(SEEDS, 1)):
        for method in METHODS:
            if not setting.dry or method in ("dense", "expert_threshold"):
                yield Case(f"{method} seed {seed}", lambda m=method, s=seed: run(m, s, setting), SAVING + 15)


def place(setting: Setting) -> Path:
    return setting.out / "training"


def source_of(setting: Setting) -> str:
    """Return the text, as `et train --data` takes it."""
    if setting.dry:
        folder = place(setting) / "text"
        return str(folder if folder.exists() else toy_shards(folder))
    return setting.data


def text(setting: Setting) -> dict[str, Any]:
    """Return the changes to a run's sections that name its text: tokens made before, or the text itself."""
    tokens = place(setting) / "tokens"
    return {"source": str(tokens) if (tokens / "tokenizer.json").exists() else source_of(setting)}


def tokenized(setting: Setting) -> Row:
    """Train a tokenizer and tokenize the text once for all runs, where the text is a folder of shards.

    Raises NotRunError for other text, which each run tokenizes in memory.
    """
    try:
        import rustbpe  # noqa: F401, which trains the tokenizer

        from expert_threshold.data import Tokenizer, open_source
        from expert_threshold.data.token_files import write_tokens
        from expert_threshold.model import PRESETS
        from expert_threshold.train.prepare import TOKENIZER_CHARACTERS
    except ImportError as lost:
        raise NotRunError(f"needs {lost.name}, which is not installed") from None
    corpus = open_source(source_of(setting))
    if corpus.parts is None or corpus.tokenized:
        raise NotRunError(f"{corpus.name} is no folder of shards; each run reads it by itself")
    tokenizer = Tokenizer.train(
        corpus.beginning(TOKENIZER_CHARACTERS), setting.pick(PRESETS[PRESET]["vocab_size"], 300)
    )
    about = {"corpus": corpus.hash, "sizes": {split: list(size) for split, size in corpus.sizes.items()}}
    splits = {split: corpus.parts(split, tokenizer) for split in corpus.sizes}
    write_tokens(place(setting) / "tokens", splits, tokenizer, about)
    return {"method": "tokens", "loss": None, "folder": str(place(setting) / "tokens")}


def rule_options(method: str, context: int) -> dict[str, Any]:
    """Return the options of a method's rule."""
    return METHODS[method][1] or ({"pool": POOL * context} if method.endswith("_sequences") else {})


def configured(method: str, seed: int, setting: Setting) -> Any:
    """Return the run's configuration."""
    from expert_threshold.config import by_path, resolve
    from expert_threshold.model import PRESETS

    preset = setting.pick(PRESET, "tiny")
    train = {"seed": seed, "sample_every": None, "checkpoint_every": None, "keep_checkpoints": 1, "log_every": 10}
    train |= setting.pick(
        {"eval_every": 100, "eval_tokens": 2**20},
        {"steps": 2, "batch_size": 2, "eval_every": 2, "eval_tokens": 256, "threads": 1, "device": "cpu"},
    )
    model = setting.pick({}, {"vocab_size": 300, "d_model": 32, "context": 32})
    context = PRESETS[preset]["context"]
    rule = {"name": METHODS[method][0], **rule_options(method, context)}
    options = by_path({"rule": rule, "train": train, "model": model, "data": text(setting)})
    return resolve(preset, options, tokens=setting.pick(TOKENS, None))


def run(method: str, seed: int, setting: Setting) -> Row:
    """Train one run, or go on with it. Raises OutOfTimeError if it was saved before its end."""
    try:
        import rustbpe  # noqa: F401, which trains the tokenizer
        from rich.console import Console

        from expert_threshold.config import RunConfig
        from expert_threshold.runs import RunFolder
        from expert_threshold.train import train
    except ImportError as lost:
        raise NotRunError(f"needs {lost.name}, which is not installed") from None
    path = place(setting) / method / f"seed_{seed}"
    path.mkdir(parents=True, exist_ok=True)
    begun = (path / "config.json").is_file()
    folder = RunFolder.open(path) if begun else RunFolder(path)
    config = RunConfig.from_dict(folder.config) if begun else configured(method, seed, setting)
    with (path.with_name(f"seed_{seed}.log")).open("a", encoding="utf-8") as log, stopped_in_time(setting):
        sections = (config.model, config.data, config.optim, config.train)
        result = train(folder, *sections, console=Console(file=log, width=120), resume=begun)
    if not result.finished:
        raise OutOfTimeError(f"saved at step {result.step} of {config.train.steps}; goes on from there")
    return {
        "method": method,
        "seed": seed,
        "steps": result.step,
        "tokens": result.tokens,
        "loss": result.loss,
        "bits_per_byte": result.bits_per_byte,
        "tokens_per_second": round(result.tokens / result.seconds),
        "folder": str(path.relative_to(setting.out)),
    }


@contextlib.contextmanager
def stopped_in_time(setting: Setting) -> Iterator[None]:
    """Send this process SIGTERM, on which training saves and returns, shortly before the stage's time is up."""
    if setting.left == float("inf"):
        yield
        return
    alarm = threading.Timer(max(setting.left - SAVING, 1), os.kill, (os.getpid(), signal.SIGTERM))
    alarm.daemon = True
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()


def lines(rows: dict[str, Row]) -> list[str]:
    """Return each method's mean loss over its seeds, the lowest first."""
    losses: dict[str, list[float]] = {}
    for row in rows.values():
        if row["loss"] is not None:
            losses.setdefault(row["method"], []).append(row["loss"])
    means = sorted((statistics.mean(found), method, len(found)) for method, found in losses.items())
    return ["validation loss: " + ", ".join(f"{m} {loss:.4f} ({n} seeds)" for loss, m, n in means)] if means else []

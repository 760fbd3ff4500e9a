"""Prepares all that the first step of a run needs, and checks it before anything is written."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import __version__
from ..data import Corpus, DataConfig, Loader, Tokenizer, Tokens, open_source, pack
from ..data.public import core_bundle
from ..data.sources import absolute
from ..data.tokens import Parts
from ..distributed import Parallel, local_batch, parallelize
from ..evaluation import Task, read_bundle
from ..evaluation.core import choose_rows
from ..files import corrupted_file_error
from ..model import GPT, GPTConfig
from ..optim import make_optimizers
from ..routing import Rule
from ..runs import Checkpoint, RunFolder
from .budget import Budget, Decision
from .checks import decisive, require_same_corpus, require_trainable, require_unchanged
from .compilation import compiled, pick_compile
from .config import RunConfig, TrainConfig
from .device import kernels_off, kernels_run, machine, pick_dtype
from .log import Display
from .state import Prepared, TrainState, load_weights

TOKENIZER_CHARACTERS = 2_000_000_000
"""The maximum number of characters, from the beginning of the text, on which a tokenizer is trained."""


class Text(NamedTuple):
    """A corpus with its tokenizer and its tokenized splits, which runs with the same data options can share."""

    corpus: Corpus
    tokenizer: Tokenizer
    validation: Tokens | None  # None if there is no validation
    train: Tokens | Parts


def prepare(
    folder: RunFolder,
    run: RunConfig,
    resume: bool,
    init_from: Path | None,
    minutes: float | None,
    display: Display,
    parallel: Parallel,
    text: Text | None = None,
) -> Prepared:
    """Prepare a new run or, with `resume`, a run at its last checkpoint. Raises ValueError as `train` does.

    text: the result of `read_text` for these options, or None to read the text here.
    """
    model, config = run.model, run.train
    require_trainable(model, config, parallel.ranks.world_size)
    device = parallel.device
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    # Weight gradients are sums over all tokens, which cuBLAS splits. By default, it would add up the parts in bfloat16.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    record = _record(run, device)
    if resume:
        record = folder.config | record
    else:
        record["init_from"] = None if init_from is None else str(init_from.resolve())
        record["command"] = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        if minutes is not None:
            record["time"] = {"minutes": minutes, "decisions": []}
    record["compiled"] = pick_compile(model, config, device, parallel.ranks.world_size, display.say)
    dtype = pick_dtype(config.dtype, device)
    record["kernels"] = kernels_run(device, dtype)
    if (off := kernels_off(device, dtype)) is not None:
        display.say(off)
    core = _read_core(config)
    saved, source = _starting_point(folder, record, resume, parallel)
    budget = _budget(folder, record, saved, resume, minutes)

    corpus = _open(run.data, display, resume) if text is None else text.corpus
    if resume:
        require_same_corpus(folder, corpus)
    record["data"]["train_shards"] = corpus.train_shards  # more may be downloaded before the run is resumed
    record["corpus"] = {"name": corpus.name, "hash": corpus.hash, "bytes": corpus.bytes}

    torch.manual_seed(config.seed)
    gpt = GPT(model, compute_dtype=dtype)
    gpt.activation_checkpointing = config.activation_checkpointing
    if source is not None:
        display.say(_load_initial(gpt, source))
    gpt.to(device).train()
    if saved is not None:
        load_weights(gpt, saved)
    if text is None:
        if saved is None and source is None:
            tokenizer = _new_tokenizer(corpus, model.vocab_size, display, parallel)
        else:
            tokenizer = (source or folder).tokenizer()
        text = _tokenized(corpus, tokenizer, config, model.context, display)
    facts = {"text": corpus.hash, "tokenizer": text.tokenizer.hash, "dtype": str(dtype)}
    parallel.ranks.require_equal(facts, "give every rank the same text and the same kind of machine")
    local = local_batch(config.batch_size, config.accumulation, model.rule, parallel.ranks.world_size)
    ranks = parallel.ranks
    threads = max(1, ((os.cpu_count() or 1) - 1) // ranks.local_world_size)
    loader = Loader(
        text.train, local.batch_size, model.context, config.seed, ranks.rank, ranks.world_size, threads=threads,
        group=parallel.world,
    )  # fmt: skip
    shards = parallelize(gpt, run.optim, parallel)
    optimizers = make_optimizers(shards.parameters.items(), run.optim, model.d_model)
    forward = compiled(gpt) if record["compiled"] else None
    state = TrainState(
        gpt, optimizers, loader, config, parallel=parallel, local=local, shards=shards, forward=forward, budget=budget
    )
    state.options = decisive(record)
    if saved is not None:
        state.restore(saved)
    extended = state.step > 0 and record.get("time") != folder.config.get("time")
    note = _describe_extension(state) if extended else None
    return Prepared(state, text.tokenizer, text.validation, core, record, note)


def read_text(model: GPTConfig, data: DataConfig, config: TrainConfig, display: Display) -> Text:
    """Return the text for new single-process runs with these options. Raises ValueError if it cannot be read."""
    corpus = _open(data, display)
    tokenizer = _new_tokenizer(corpus, model.vocab_size, display, Parallel())
    return _tokenized(corpus, tokenizer, config, model.context, display)


def _open(data: DataConfig, display: Display, resume: bool = False) -> Corpus:
    try:
        corpus = open_source(**asdict(data))
    except ValueError as error:
        if not resume:
            raise
        raise ValueError(f"{error}; with --resume, use --data to give the text's new path") from None
    display.say(corpus.describe())
    return corpus


def _tokenized(corpus: Corpus, tokenizer: Tokenizer, config: TrainConfig, context: int, display: Display) -> Text:
    validation: Tokens | None = None
    if config.eval_every is not None:
        # Only full windows are evaluated, and the last target needs one more token.
        enough = None if config.eval_tokens is None else config.eval_tokens + context
        progress = display.task("tokenizing text for validation")
        validation = pack(corpus, tokenizer, "validation", progress, max_tokens=enough)
        if len(validation) < 2:
            raise ValueError(
                f"{corpus.name} has too little validation text for a loss ({len(validation)} tokens); "
                "provide more text, or use --eval-every none"
            )
    if corpus.parts is not None:
        return Text(corpus, tokenizer, validation, corpus.parts("train", tokenizer))
    train = pack(corpus, tokenizer, "train", display.task("tokenizing text for training"))
    return Text(corpus, tokenizer, validation, train)


def _budget(
    folder: RunFolder, record: dict[str, Any], saved: Checkpoint | None, resume: bool, minutes: float | None
) -> Budget:
    """Return a run's budget with its decisions so far.

    If a resumed run is given more steps or a different number of minutes, the budget is extended and `record` updated.
    """
    path, asked = folder.path / "config.json", record["train"]["steps"]
    if not resume:
        return Budget(asked, None if minutes is None else 60 * minutes)
    time = record.get("time", {"minutes": None, "decisions": []})
    with corrupted_file_error(path, "restore it from a backup, or train again"):
        steps = int(folder.section("train")["steps"])
        budget = Budget(steps, time["minutes"] and 60 * time["minutes"], time["decisions"])
    if saved is not None:
        require_unchanged(folder, record, budget, saved)
        # A checkpoint is saved before its step is validated.
        known = [record.get("elapsed", 0.0) for record in folder.metrics.read() if record["step"] <= saved.step]
        saved.state["elapsed"] = max([saved.state["elapsed"], *known])
    step, elapsed = (0, 0.0) if saved is None else (saved.step, saved.state["elapsed"])
    if asked == steps and minutes in (None, time["minutes"]):
        return budget
    if minutes is not None:
        if not step or 60 * minutes <= elapsed:
            used = f"{folder.path} has already used {elapsed / 60:.3g} minutes for {step} steps"
            raise ValueError(f"minutes={minutes}: {used}; {'allow more minutes, or ' if step else ''}use --steps")
        asked = step + max(1, int(step * (60 * minutes / elapsed - 1)))
    elif asked <= steps:
        raise ValueError(f"steps={asked} is not above the {steps} steps of {folder.path}; use a larger value")
    if step == 0:
        record.pop("time", None)
        return Budget(asked)
    extended = [*budget.decisions, Decision(step, asked, elapsed, extends=True)]
    record["train"] |= {"steps": asked}
    record["time"] = {"minutes": minutes, "decisions": [list(decision) for decision in extended]}
    return Budget(asked, None if minutes is None else 60 * minutes, extended)


def _describe_extension(state: TrainState) -> str:
    """Return a line that describes the learning rates of a run that is being extended at this step."""
    budget, steps = state.budget, (state.step - 1, state.step, state.steps - 1)
    rates = [state.optimizers.learning_rates(step, budget.scheduled, budget.progress(step)) for step in steps]
    name = next(iter(rates[0]))
    path = ", ".join(f"{rate[name]:.3g} at step {step + 1:,}" for step, rate in zip(steps, rates, strict=True))
    return f"extended to {state.steps:,} steps, with the learning rates of a run of that length: {name} {path}"


def _starting_point(
    folder: RunFolder, record: dict[str, Any], resume: bool, parallel: Parallel
) -> tuple[Checkpoint | None, RunFolder | None]:
    """Return the run's last checkpoint or, if there is none, the run that provides its initial weights.

    At most one of them is not None. Raises ValueError if a resumed run has lost its checkpoints.
    """

    def last() -> int | None:
        if folder.has_lost_checkpoints:
            raise ValueError(
                f"{folder.checkpoints_path} is missing or empty, so the run cannot continue; restore it from a backup, "
                "or train again in another folder"
            )
        return folder.latest_checkpoint()

    step = parallel.ranks.from_main(last) if resume else None
    saved = None if step is None else folder.load_checkpoint(step)
    if saved is not None and "optimizer" not in saved.tensors:
        raise ValueError(
            f"{folder.path} contains only the weights of step {saved.step}; "
            f"start another run with --init-from {folder.path}"
        )
    if saved is not None or record.get("init_from") is None:
        return saved, None
    with corrupted_file_error(folder.path / "config.json", "restore it from a backup, or train again"):
        source = Path(record["init_from"])
    return None, RunFolder.open(source)


def _read_core(config: TrainConfig) -> Sequence[Task]:
    """Return the downloaded CORE tasks, or an empty list if training does not evaluate them."""
    if config.core_every is None:
        if config.core_max_per_task is not None:
            raise ValueError(
                f"core_max_per_task={config.core_max_per_task} has no effect without CORE; also set --train.core-every"
            )
        return []
    bundle = core_bundle()
    if bundle is None:
        raise ValueError(f"core_every={config.core_every} needs the CORE questions; download them with et data core")
    tasks = read_bundle(bundle)
    for task in tasks:
        choose_rows(task, config.core_max_per_task)  # if there are too few, raise now rather than after some steps
    return tasks


def _new_tokenizer(corpus: Corpus, vocab_size: int, display: Display, parallel: Parallel) -> Tokenizer:
    """Return the tokenizer that comes with the text if it has the right size, otherwise train one on the text."""
    beside = corpus.tokenizer
    if beside is not None and beside.vocab_size == vocab_size:
        return beside
    if corpus.tokenized and beside is not None:
        raise ValueError(
            f"vocab_size={vocab_size}, but the tokens in {corpus.name} have a vocabulary of {beside.vocab_size}; "
            f"use --vocab-size {beside.vocab_size}"
        )
    display.say(f"training a tokenizer with {vocab_size} tokens")

    def train() -> list[str]:
        text = corpus.beginning(TOKENIZER_CHARACTERS, display.task("reading text for the tokenizer"))
        tokenizer = Tokenizer.train(text, vocab_size)
        return [tokenizer.decode_bytes([token]).hex() for token in range(tokenizer.bos)]

    return Tokenizer([bytes.fromhex(token) for token in parallel.ranks.from_main(train)])


def _record(run: RunConfig, device: torch.device) -> dict[str, Any]:
    """Return the complete configuration, with every `auto` resolved for this machine."""
    record = run.to_dict()
    record["data"]["source"] = absolute(run.data.source)
    dtype = str(pick_dtype(run.train.dtype, device)).removeprefix("torch.")
    record["train"] |= {"device": device.type, "dtype": dtype, "threads": torch.get_num_threads()}
    return record | {
        "machine": machine(device),
        "versions": {
            "expert_threshold": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "commit": _commit(),
        },
    }


def _commit() -> str | None:
    """Return the commit of the package's source, marked if modified, or None if git does not track the source."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # fails in a repository that does not track this file
        return git("describe", "--always", "--dirty", "--abbrev=12")
    except (OSError, subprocess.SubprocessError):
        return None


# Options of the model that may differ from those of the weights. Rules may differ, but not in their number of experts.
FREE_AT_START = {"context", "initialization", "dispatch", "z_loss", "rule"}


def _load_initial(gpt: GPT, source: RunFolder) -> str:
    """Load another run's weights, and its rule's state if this model's rule can continue it.

    Return a line for the user. Raises ValueError if an option of the architecture differs.
    """
    mine, theirs = gpt.config, GPTConfig.from_dict(source.config)
    shapes = {name: (own, vars(theirs)[name]) for name, own in vars(mine).items() if name not in FREE_AT_START}
    my_experts, their_experts = (None if c.rule is None else c.rule.num_experts for c in (mine, theirs))
    for name, (own, other) in (shapes | {"num_experts": (my_experts, their_experts)}).items():
        if own != other:
            raise ValueError(f"{name}={own!r}, but --init-from {source.path} has {other!r}; use the same value")
    saved = source.load_checkpoint(parts=("model",))
    weights = _fitted(saved.tensors["model"], gpt, theirs.rule)
    gpt.load_state_dict(weights, strict=False)  # rules may differ in their state
    said = [f"starts from the weights and the tokenizer of {source.path}, step {saved.step}"]
    for _, moe in gpt.moe_layers():
        assert theirs.rule is not None
        moe.router.state = moe.router.rule.begin_run(moe.router.state, theirs.rule.experts_per_token)
    for layer, moe in gpt.moe_layers()[:1]:  # all layers have the same rule
        router, rule = moe.router, moe.router.rule
        assert theirs.rule is not None
        if rule.num_scores not in (theirs.rule.num_scores, rule.num_experts):
            said.append("router scores of null slots are newly initialized")
        if fields := router.state._fields:
            loaded = {f"blocks.{layer}.moe.router.state_{field}" for field in fields} <= weights.keys()
            said.append(f"the state of its rule is {'loaded' if loaded else 'not loaded'}")
        said.append(f"a new warmup of {rule.warmup} steps starts" if rule.warmup else "")
    return "; ".join(filter(None, [*said, "optimizers start with an empty state"]))


def _fitted(weights: Mapping[str, Tensor], gpt: GPT, rule: Rule | None) -> dict[str, Tensor]:
    """Return the weights of a run that used `rule`, adapted to this model's rule.

    If the number of scores differs, the router's rows for null scores keep their initial values. So does the rule's
    state if this model's rule cannot continue it or if its shape differs.
    """
    fitted, mine = dict(weights), gpt.config.rule
    foreign = mine is None or rule is None or not mine.can_start_from(rule)
    for layer, moe in gpt.moe_layers():
        router, name = moe.router, f"blocks.{layer}.moe.router."
        theirs, own = weights[name + "weight"], router.weight.detach()
        if theirs.shape != own.shape:
            experts = router.rule.num_experts
            fitted[name + "weight"] = torch.cat((theirs[:experts], own[experts:].to(theirs)))
        for field, value in router.state._asdict().items():
            key = f"{name}state_{field}"
            if key in weights and (foreign or weights[key].shape != value.shape):
                del fitted[key]
    return fitted

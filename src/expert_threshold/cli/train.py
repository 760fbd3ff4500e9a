"""`et train`: train a model into a run folder, or go on with a run."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..analysis.report import write_report
from ..analysis.sentences import counted, short
from ..config import RunConfig
from ..data import Tokenizer
from ..generate import generate, printable
from ..model import GPT
from ..plan import costs
from ..routing import rule_name
from ..runs import RunFolder
from ..train import TrainResult, train
from ..train.checks import FREE_ON_RESUME
from ..train.device import keep_freed_memory, pick_device, pick_dtype
from ..train.log import clock
from ..train.pace import tokens_within
from . import is_out_of_memory
from .options import Option
from .run_options import parse_run, preset_of, resolve_run

OPTIONS = [
    Option("out", str, "runs/PRESET-RULE", "The run folder to make; one that exists is refused."),
    Option("resume", str, None, "Go on with the run in this folder; all other options are read from there."),
    Option("init_from", str, None, "Begin with the model, the weights and the tokenizer of this run."),
    Option("minutes", float | None, None, "Train for about so long, instead of --steps, by the speed measured first."),
]

# One that opens a document, one of code, one of prose.
PROMPTS = ("", "def ", "The ")
SAMPLE_TOKENS = 96


def run(arguments: Sequence[str]) -> None:
    """Train as the arguments say."""
    given = parse_run("et train", "Train a language model into a run folder, or resume one.", OPTIONS, arguments)
    keep_freed_memory()
    console = Console()
    if "resume" in given:
        folder = RunFolder.open(given["resume"])
        config = _resumed(folder, given)
        console.print(introduce(config), highlight=False, soft_wrap=True)
        result = train_run(folder, config, console, resume=True)
    else:
        config = resolve_run(given)
        name = given.get("recipe") or rule_name(config.model.rule)
        path = given.get("out", f"runs/{preset_of(given)}-{name}")
        init_from = Path(given["init_from"]) if "init_from" in given else None
        folder = RunFolder.create(path)
        try:
            if given.get("minutes") is not None:
                config = _within_minutes(given, config, console)
            console.print(introduce(config), highlight=False, soft_wrap=True)
            result = train_run(folder, config, console, init_from=init_from)
        except BaseException:
            with contextlib.suppress(OSError):
                folder.path.rmdir()  # goes only if nothing was written yet
            raise
    if result.finished:
        console.print(conclude(folder, result), markup=False, highlight=False, soft_wrap=True)


def _within_minutes(given: dict[str, Any], config: RunConfig, console: Console) -> RunConfig:
    """The configuration with the tokens that can be trained on in the time. Raises ValueError for nonsense."""
    minutes = given["minutes"]
    for other in ("steps", "tokens"):
        if given.get(other) is not None:
            raise ValueError(
                f"minutes={minutes} and {other}={given[other]} both say how long to train; give one of them"
            )
    if not 0 < minutes < math.inf:
        raise ValueError(f"minutes={minutes} must be above 0 and finite")
    console.print("measuring how fast this machine is", highlight=False)
    return resolve_run(given | {"tokens": tokens_within(60 * minutes, config.model, config.optim, config.train)})


def train_run(folder: RunFolder, config: RunConfig, console: Console, **options: Any) -> TrainResult:
    """Train in a folder, with samples and a report. Raises ValueError as `train` does, and where memory ends."""
    try:
        result = train(
            folder, config.model, config.data, config.optim, config.train, sample=sample, console=console, **options
        )
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(
            "out of memory; use a smaller --batch-size with more --accumulation, --activation-checkpointing, "
            "or a smaller model"
        ) from error
    try:
        write_report(folder)
    except Exception as error:  # whatever it is, the run itself is whole
        reason = " ".join(str(error).split()) or type(error).__name__
        console.print(f"warning: no report was written: {reason}", markup=False, highlight=False, soft_wrap=True)
    return result


def _resumed(folder: RunFolder, given: dict[str, Any]) -> RunConfig:
    """The run's own configuration, but for what may change. Raises ValueError naming any other option that is given."""
    changes = {name: value for name, value in given.items() if name != "resume"}
    for name, value in changes.items():
        if name not in FREE_ON_RESUME:
            flag = "PRESET" if name == "preset" else "--" + name.replace("_", "-")
            raise ValueError(
                f"{flag} {value} is decided by the run that --resume goes on with; leave it out, "
                f"or start another run with --init-from {folder.path}"
            )
    config = RunConfig.from_dict(folder.config)
    return replace(config, train=replace(config.train, **changes))


def introduce(config: RunConfig) -> str:
    """What is about to be trained, on what. Raises ValueError if the device is not there."""
    cost = costs(config)
    rule = config.model.rule
    experts = "" if rule is None else f" among {rule.num_experts} experts, {rule.experts_per_token:g} per token"
    device = pick_device(config.train.device)
    dtype = str(pick_dtype(config.train.dtype, device)).removeprefix("torch.")
    threads = f", {counted(config.train.threads or torch.get_num_threads(), 'thread')}" if device.type == "cpu" else ""
    return (
        f"model: {short(cost['params_total'])} parameters, {short(cost['params_active'])} active; "
        f"rule {cost['rule']}{experts}\n"
        f"training: {cost['steps']:,} steps of {cost['tokens_per_step']:,} tokens = {short(cost['tokens'])} tokens, "
        f"{cost['flops_total']:.2e} FLOPs; on {device.type} in {dtype}{threads}"
    )


def conclude(folder: RunFolder, result: TrainResult) -> str:
    """What came out, where all of it lies, and what to type next."""
    lines = []
    samples = sorted(folder.samples.glob("step_*.txt"))
    if samples:
        lines += ["", printable(samples[-1].read_text(encoding="utf-8", errors="replace")).rstrip(), ""]
    if result.loss is not None and result.bits_per_byte is not None:
        lines.append(f"validation loss {result.loss:.4f}, {result.bits_per_byte:.4f} bits per byte")
    path = shlex.quote(str(folder.path))
    return "\n".join(
        [
            *lines,
            f"{result.step:,} steps in {clock(result.seconds)}; all of it lies in {folder.path}",
            *([f"report: {folder.report}"] if folder.report.exists() else []),
            f"next: et generate {path} --prompt 'def '",
        ]
    )


def sample(model: GPT, tokenizer: Tokenizer, step: int) -> str:
    """What the model writes after each of a few fixed prompts, always with the same seed."""
    texts = []
    for prompt in PROMPTS:
        steps = generate(model, tokenizer, prompt, max_tokens=SAMPLE_TOKENS, seed=0)
        texts.append(f"--- step {step}, prompt {prompt!r}\n{prompt}{''.join(s.text for s in steps)}\n")
    return "\n".join(texts)

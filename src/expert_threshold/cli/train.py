"""`et train`: trains a model into a run folder, or resumes a run."""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..analysis.sentences import counted, short
from ..config import RunConfig, in_section, run_config
from ..data.public import FINEWEB_EDU
from ..data.tokens import MANIFEST
from ..distributed import INTERRUPTED, Failure, Rendezvous, is_lost_rank, launch, local_batch
from ..files import expand, missing_folders, remove_empty
from ..full_run import SAMPLING, train_run
from ..generate import printable
from ..install import et, program
from ..integrations.export import run_folder
from ..option import Count, Minutes
from ..plan import costs, window
from ..routing import rule_name
from ..runs import RunFolder
from ..train import TrainResult
from ..train.checks import FREE_ON_RESUME, SAME_COMMAND, require_trainable
from ..train.device import keep_freed_memory, pick_device, pick_dtype
from ..train.interrupt import handle
from ..train.log import RunConsole, clock, say
from ..train.pace import tokens_within
from ..train.saving import LostSaveError
from . import USAGE_ERROR, is_users, one_line
from .options import Option, flag_of
from .run_options import parse_run, preset_of, resolve_run, with_paths

OPTIONS = [
    Option("out", str, "runs/PRESET-RULE", "Run folder to create; it must not exist."),
    Option(
        "resume",
        str,
        None,
        "Run to resume with its own options, on any number of ranks. A larger --steps, --tokens or --minutes extends "
        "the run, and --data gives the new location of its text if it has moved.",
    ),
    Option(
        "init_from",
        str,
        None,
        "Run whose model, weights and tokenizer to start from, or an export on the Hugging Face hub as hub:OWNER/NAME. "
        "Cutoffs or biases are kept, whereas warmup and decay are scaled to the new run.",
    ),
    Option("nproc", Count | None, None, "Local processes, one per GPU."),
    Option(
        "minutes",
        Minutes | None,
        None,
        "Time budget instead of --steps. It includes validation, samples and checkpoints, but not reading "
        "the text or evaluating CORE.",
    ),
]


def run(arguments: Sequence[str]) -> None:
    """Train as the arguments say, or as one rank if a launcher has started several."""
    rendezvous = Rendezvous.from_env()
    folders: list[RunFolder] = []
    if rendezvous.is_alone:
        _run(arguments, rendezvous, folders)
        return
    # The launcher terminates all ranks as soon as one exits, so they first agree on what to report.
    handle(signal.default_int_handler)
    code = 0
    try:
        _run(arguments, rendezvous, folders)
    except SystemExit:
        raise
    except BaseException as error:
        handle(signal.SIG_IGN)
        remedy = f"continue: {et()} train --resume {shlex.quote(str(folders[0].path))}" if folders else "start it again"
        code = rendezvous.report_failure(
            _failure(error), remedy, lambda text: print(f"et train: {text}", file=sys.stderr, flush=True)
        )
    sys.stdout.flush()
    os._exit(code)  # connection threads must neither keep this process alive nor abort its exit


def _failure(error: BaseException) -> Failure:
    """Return why this rank exits. The failure is not its own if another rank was lost or a signal stopped it."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, KeyboardInterrupt | LostSaveError):
        return Failure(INTERRUPTED, 1, is_own=False)
    if is_lost_rank(error):
        return Failure(text, 1, is_own=False)
    if is_users(error):
        return Failure(with_paths(one_line(error)), USAGE_ERROR)
    traceback.print_exception(error)
    return Failure(text, 1)


def _run(arguments: Sequence[str], rendezvous: Rendezvous, folders: list[RunFolder]) -> None:
    """Train, and append the run's folder to `folders` as soon as it is known."""
    given = parse_run("et train", "Train a language model into a run folder, or resume one.", OPTIONS, arguments)
    lengths = [f"{path}={given[path]}" for path in ("train.steps", "tokens", "minutes") if given.get(path) is not None]
    if len(lengths) > 1:
        raise ValueError(f"{' and '.join(lengths)} each set the length of the run; use only one of them")
    if "init_from" in given:
        given["init_from"] = rendezvous.from_main(lambda: run_folder(given["init_from"]))
    processes = given.pop("nproc", None)
    if processes not in (None, 1) and rendezvous.is_alone:  # this process is not a launched rank itself
        _launch(arguments, given, processes)
        return
    keep_freed_memory()
    facts = {name: value for name, value in given.items() if name != "data.source"}  # the text is compared later
    rendezvous.require_equal({"version": __version__, "torch": torch.__version__} | facts, SAME_COMMAND)
    console = RunConsole(quiet=not rendezvous.is_main)
    out = given["resume"] if "resume" in given else given.get("out", _default_out(given))
    made = f"made {out}"
    # The launcher may have restarted the ranks after a failure, when the run had started and so can resume.
    again = rendezvous.from_main(lambda: rendezvous.is_marked(made) and Path(out, "config.json").is_file())
    if "resume" in given or again:
        folder = RunFolder.open(out)
        folders.append(folder)
        config = _resumed(folder, given, rendezvous.world_size) if "resume" in given else _config_of(folder)
        say(console, introduce(config, rendezvous.world_size))
        if "train.threads" not in given and (note := _other_threads(config)) is not None:
            say(console, note)
        minutes = given.get("minutes") if "resume" in given else None  # a restarted run keeps its own
        result = train_run(folder, config, console, resume=True, minutes=minutes, rendezvous=rendezvous)
    else:
        config = resolve_run(given)
        init_from = Path(given["init_from"]) if "init_from" in given else None
        minutes = given.get("minutes")
        if minutes is not None and not rendezvous.is_alone:
            raise ValueError(f"minutes={minutes} is not supported with several ranks; use --steps")
        missing = missing_folders(Path(out))
        folder = RunFolder(Path(rendezvous.from_main(lambda: str(RunFolder.create(out).path))))
        folders.append(folder)
        rendezvous.mark(made)
        try:
            if minutes is not None:
                say(console, "measuring the speed of this machine")
                tokens = tokens_within(60 * minutes, config)
                config = resolve_run(given | {"tokens": tokens})
            say(console, introduce(config, rendezvous.world_size))
            result = train_run(folder, config, console, init_from=init_from, minutes=minutes, rendezvous=rendezvous)
        except BaseException:
            if rendezvous.is_main:
                remove_empty(missing)
            raise
    if result.finished and rendezvous.is_main:
        say(console, conclude(folder, result))


def _default_out(given: dict[str, Any]) -> str:
    name = given.get("recipe") or rule_name(resolve_run(given).model.rule)
    return f"runs/{preset_of(given)}-{name}"


def _launch(arguments: Sequence[str], given: dict[str, Any], processes: int) -> None:
    """Run the same command in several processes. Raises ValueError before that if they would reject an option."""
    config = _resumed(RunFolder.open(given["resume"]), given, processes) if "resume" in given else resolve_run(given)
    require_trainable(config.model, config.train, processes)
    code = launch([*program(), "train", *arguments], processes)
    if code:
        raise SystemExit(code)


def _config_of(folder: RunFolder) -> RunConfig:
    with folder.named():
        return run_config(folder.config)


def _resumed(folder: RunFolder, given: dict[str, Any], ranks: int) -> RunConfig:
    """Return the run's configuration, updated with the given options. Raises ValueError if one of them may not change.

    Experts are split as before, or as far as the number of ranks allows, unless --train.expert-parallel is given.
    """
    changes = {path: given[path] for path in given if path not in ("resume", "nproc", "data.source", "minutes")}
    for path, value in changes.items():
        if path not in {"tokens", "train.steps", *(f"train.{name}" for name in FREE_ON_RESUME)}:
            flag = flag_of(path)
            typed = {True: flag, False: f"--no-{flag[2:]}"}[value] if isinstance(value, bool) else f"{flag} {value}"
            raise ValueError(
                f"{f'PRESET {value}' if path == 'preset' else typed} is fixed by the run that --resume continues; "
                f"leave it out, or start another run with --init-from {folder.path}"
            )
    config = _config_of(folder)
    if "tokens" in changes:
        per_step = config.train.batch_size * config.train.accumulation * config.model.context
        changes["train.steps"] = max(1, changes["tokens"] // per_step)
    changes.setdefault("train.expert_parallel", math.gcd(config.train.expert_parallel, ranks))
    # The text may have moved, as shards or as their tokens, but its hash must be the same.
    moved = in_section(given, "data")
    if moved.get("source", FINEWEB_EDU) != FINEWEB_EDU:
        place = expand(moved["source"])
        if not place.is_dir() or (place / MANIFEST).is_file():
            moved["train_shards"] = None  # only shards can be counted
    train = replace(config.train, **in_section(changes, "train"))
    return replace(config, data=replace(config.data, **moved), train=train)


def _other_threads(config: RunConfig) -> str | None:
    """Return a note if a resumed run keeps a number of threads other than this process would use, or else None."""
    usual = torch.get_num_threads()
    if config.train.threads in (None, usual) or pick_device(config.train.device).type != "cpu":
        return None
    threads = counted(config.train.threads, "thread")
    return f"note: using {threads} as before, so that rounding is the same; --threads {usual} uses {usual}"


def introduce(config: RunConfig, ranks: int) -> str:
    """Return lines about the model and the training to come. Raises ValueError if the device is absent."""
    cost = costs(config)
    rule = config.model.rule
    experts = "" if rule is None else f" among {rule.num_experts} experts, {rule.experts_per_token:g} per token"
    device = pick_device(config.train.device)
    dtype = str(pick_dtype(config.train.dtype, device)).removeprefix("torch.")
    threads = f", {counted(config.train.threads or torch.get_num_threads(), 'thread')}" if device.type == "cpu" else ""
    processes = f", {ranks} ranks" if ranks > 1 else ""
    lines = [
        f"model: {short(cost['params_total'])} parameters, {short(cost['params_active'])} active; "
        f"rule {cost['rule']}{experts}",
        f"training: {cost['steps']:,} steps of {cost['tokens_per_step']:,} tokens = {short(cost['tokens'])} tokens, "
        f"{cost['flops_total']:.2e} FLOPs; on {device.type} in {dtype}{threads}{processes}",
    ]
    if cost["assumed"] is not None:
        lines.append(f"note: {cost['assumed']}")
    if rule is not None:
        local = local_batch(config.train.batch_size, config.train.accumulation, rule, ranks)
        pool = window(config, local).pool
        if pool != cost["pool"]:
            lines.append(
                f"note: {cost['rule']} uses pools of {pool:,} tokens on each rank, not {cost['pool']:,} as in a single "
                f"process; an --accumulation divisible by {ranks} keeps its micro-batches whole"
            )
    return "\n".join(lines)


def conclude(folder: RunFolder, result: TrainResult) -> str:
    """Return lines with the results, their folder, and what to type next."""
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
            f"{result.step:,} steps in {clock(result.elapsed)}, {clock(result.seconds)} of it without validation, "
            f"samples and checkpoints; results in {folder.path}",
            *([f"report: {folder.report}"] if folder.report.exists() else []),
            f"next: {et()} generate {path} --temperature {SAMPLING['temperature']} "
            f"--repetition-penalty {SAMPLING['repetition_penalty']}",
            f"explorer: {et()} serve {path}",
        ]
    )

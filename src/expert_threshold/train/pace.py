"""Measures how fast a run will train on this machine."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import replace
from typing import cast

import torch

from ..data import Batch, Loader
from ..model import GPT
from ..optim import make_optimizers
from .budget import SHARE_OF_STEPS
from .compilation import compiled, pick_compile
from .config import RunConfig
from .device import gc_frozen, pick_device, pick_dtype
from .loop import train_step
from .state import TrainState

WARMUP_STEPS, SECONDS = 3, 5.0


def tokens_within(seconds: float, run: RunConfig) -> int:
    """Return how many tokens a run can train on in `seconds`, given the median step time of a model on random tokens.

    This takes SECONDS plus the time to build the model. It preserves the state of torch's global random generator.
    """
    model, config = run.model, run.train
    device = pick_device(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with torch.random.fork_rng(devices=[]):
        gpt = GPT(model, compute_dtype=pick_dtype(config.dtype, device)).to(device)
        gpt.activation_checkpointing = config.activation_checkpointing
        tokens = torch.randint(model.vocab_size, (config.batch_size, model.context + 1))
        batches = itertools.repeat(Batch(tokens[:, :-1], tokens[:, 1:]))
        optimizers = make_optimizers(gpt.named_parameters(), run.optim, model.d_model)
        # `auto` depends on the number of steps, which is not known yet.
        compiling = config.compile == "on" and pick_compile(model, config, device, ranks=1, say=lambda _: None)
        forward = compiled(gpt) if compiling else None
        config = replace(config, steps=max(config.steps, WARMUP_STEPS + 1))  # at least one step is measured
        state = TrainState(gpt, optimizers, cast(Loader, batches), config, forward=forward)
        times: list[float] = [_seconds_of_step(state)]
        end = time.perf_counter() + SECONDS
        with gc_frozen():
            while state.step <= WARMUP_STEPS or (time.perf_counter() < end and state.step < config.steps):
                times.append(_seconds_of_step(state))
    turns = min(optimizers.config.expert_period, len(times) - WARMUP_STEPS)  # steps within a round differ in duration
    rounds = [statistics.fmean(times[i : i + turns]) for i in range(WARMUP_STEPS, len(times) - turns + 1, turns)]
    steps = SHARE_OF_STEPS * seconds / statistics.median(rounds)
    return max(round(steps), 1) * config.batch_size * config.accumulation * model.context


def _seconds_of_step(state: TrainState) -> float:
    before = state.seconds
    train_step(state)
    return state.seconds - before

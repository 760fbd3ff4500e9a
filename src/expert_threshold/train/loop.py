"""Runs the training loop, which alternates between optimizer steps and other work."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..data import Loader
from ..distributed import ALONE, LocalBatch, Rendezvous, Status, process_groups
from ..install import et
from ..model import Output
from ..routing import all_finite
from ..runs import RunFolder
from ..runs.lock import LOCK
from .checks import SAME_COMMAND, by_path
from .config import RunConfig
from .device import gc_frozen, pick_device
from .evaluations import Evaluations, Sample, Timer, Validated
from .interrupt import Interrupt
from .log import Display, Title, run_log
from .prepare import Text, prepare
from .saving import Saver
from .state import Sums, TrainState, all_reduce, describe_nonfinite, step_values

SHARED_WITHIN = 10.0  # seconds within which a network file system must show all ranks what the main rank wrote


class TrainResult(NamedTuple):
    """The outcome of a run. `loss` and `bits_per_byte` are from the last validation, or None if there was none."""

    step: int
    finished: bool  # False if a signal stopped the run, which can then be resumed from a checkpoint of `step`
    loss: float | None
    bits_per_byte: float | None
    seconds: float  # spent on optimizer steps, in all sessions
    tokens: int
    elapsed: float  # seconds, including validation, samples and checkpoints, but not CORE


def train_step(state: TrainState, status: Callable[[], Status] = Status) -> bool:
    """Take one optimizer step. Return False if it was skipped because a loss, a score or a gradient is not finite.

    A skipped step consumes its batch, leaves weights, optimizers and rules unchanged, and sets `state.not_finite` to
    the reason. `RunLog` gives up after ten skipped steps in a row.

    status: returns this rank's status. The sum over all ranks is then stored in `state.status`.
    """
    start = time.perf_counter()
    model, optimizers, shards, local = state.model, state.optimizers, state.shards, state.local
    world_size, step, budget = state.parallel.ranks.world_size, state.step, state.budget
    micro_batches = local.accumulation * world_size  # of all ranks
    tokens = 0
    sums: Sums | None = None
    for micro_batch in range(local.accumulation):
        batch = next(state.loader)
        tokens += batch.targets.numel() * world_size
        if micro_batch == local.accumulation - 1:
            shards.begin_last_backward()
        output = state.forward(*(to_device(part, state.device) for part in batch))
        # Gradients are summed over ranks, so losses are divided by the number of micro-batches on all ranks. This is
        # also right for split experts: their owner receives the rows of all ranks in its group, and the gradients of
        # other groups are added.
        loss, cross_entropy = (each / micro_batches for each in losses(local, output, batch.targets, state.loader))
        loss.backward()
        new = Sums(loss.detach(), cross_entropy.detach(), output.observations)
        sums = new if sums is None else sums + new
    assert sums is not None
    shards.reduce_gradients()
    sums, norm, state.status = all_reduce(sums, optimizers.grad_norm(), status(), state.parallel.world)

    # The host waits for the device here, and in each layer whose backend counts the experts' loads. If there are
    # several ranks, it also waits for their status and, in each layer, for the number of tokens in the global pool.
    is_finite = bool(all_finite([norm, *tree_leaves(sums)]))
    if is_finite:
        optimizers.step(step, budget.scheduled, norm, shards.gather_updated, budget.progress(step))
        # This comes before the rules are updated, so that values refer to the cutoffs that routed this step.
        means = {"loss": sums.loss, "cross_entropy": sums.cross_entropy, "grad_norm": norm}
        state.add_to_interval(means | step_values(model, sums.observations))
        model.update_rules(sums.observations)
    shards.finish_step()
    not_finite = "" if is_finite else describe_nonfinite(model, sums)
    state.count_step(not_finite, tokens, time.perf_counter() - start)
    return is_finite


def losses(local: LocalBatch, output: Output, targets: Tensor, loader: Loader) -> tuple[Tensor, Tensor]:
    """Return the loss and the cross-entropy, scaled so that their means over ranks are the means over the micro-batch.

    targets: this rank's targets, (batch, time), negative where ignored. loader: counts the targets on all ranks.
    """
    loss, cross_entropy = output.loss, output.cross_entropy
    assert loss is not None
    assert cross_entropy is not None
    if local.joint_mean:
        weight = int((targets >= 0).sum()) * local.ranks / max(loader.targets, 1)
        if weight != 1:  # the rules' losses are means over all tokens, of which every rank has equally many
            loss, cross_entropy = loss + (weight - 1) * cross_entropy, weight * cross_entropy
    return loss, cross_entropy


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy x from the host to the device. The host does not wait for a copy to CUDA, which is from pinned memory."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def train(
    folder: RunFolder,
    run: RunConfig,
    *,
    resume: bool = False,
    init_from: Path | None = None,
    minutes: float | None = None,
    sample: Sample | None = None,
    text: Text | None = None,
    validated: Validated | None = None,
    console: Console | None = None,
    title: Title = lambda left: "",
    rendezvous: Rendezvous = ALONE,
) -> TrainResult:
    """Train a run in a folder that was created for it or, with `resume`, continue from its last checkpoint.

    init_from: a run that provides the initial weights, the tokenizer, and the rule's state if the rules are compatible.
    minutes: a time budget, to which the number of steps is adapted during the run; see `budget`. With `resume`, more
    `config.steps` or a different number of minutes extends the run. sample: returns text every `sample_every` steps.
    text: the result of `read_text` for these options, which several runs can share. validated: called with the step and
    the loss of each validation; an exception from it ends the run. console: where progress is shown, or None. title:
    returns the start of each line about steps. rendezvous: the ranks that train together, each of which must make this
    call.

    After one of the signals in `interrupt`, the run finishes its step, saves a checkpoint and returns. Raises
    ValueError if options contradict each other, the run or the machine, and after ten skipped steps in a row. Raises
    OSError if the disk is full. Earlier checkpoints remain intact.
    """
    config = run.train
    if config.sample_every is not None and sample is None:
        raise ValueError(f"sample_every={config.sample_every} needs the argument `sample`, which generates the text")
    if resume and init_from is not None:
        raise ValueError(f"init_from={init_from} starts a new run; omit it to resume {folder.path}")
    with (
        _locked(folder, rendezvous, by_path(run.to_dict())),
        Interrupt(quiet=not rendezvous.is_alone) as interrupt,
        Display(console if rendezvous.is_main else None) as display,
        process_groups(
            rendezvous,
            pick_device(config.device),
            expert_parallel=config.expert_parallel,
            shard=config.shard,
            timeout=config.timeout,
        ) as parallel,
    ):
        prepared = prepare(folder, run, resume, init_from, minutes, display, parallel, text)
        state = prepared.state

        with (
            run_log(folder, prepared, display, title) as log,
            closing(Saver(folder, parallel, config.keep_checkpoints)) as saver,
            closing(state.loader),
            gc_frozen(),
        ):
            interrupt.deferred = True  # until now, there was nothing to save
            timer = Timer(state, prepared.validation)
            evaluations = Evaluations(folder, prepared, sample, saver, log, timer, interrupt, validated)
            if state.step > 0:
                evaluations.run_due()  # some are still due if the run stopped right after saving

            while state.step < state.steps and not interrupt.stops(state):
                with timer.measure():
                    train_step(state, lambda: saver.status(interrupt.requested or rendezvous.is_orphaned))
                if not interrupt.stops(state):
                    timer.revise_steps(log)
                saver.commit_if_written(state.status)
                log.step()
                # Saving comes first, so that a failing evaluation costs no training.
                if state.is_due(config.checkpoint_every) or state.is_at_end or evaluations.need_checkpoint():
                    with timer.measure("checkpoint"):
                        saver.save(state.checkpoint())
                if not interrupt.stops(state):
                    evaluations.run_due()  # validate, write a sample, evaluate CORE

            finished = state.is_at_end and not evaluations.are_due()
            if not finished:
                with timer.measure("checkpoint"):
                    saver.save(state.checkpoint())
            saver.finish()
            if not finished:
                path = shlex.quote(str(folder.path))
                display.say(f"stopped at step {state.step} of {state.steps}; to continue: {et()} train --resume {path}")
            return TrainResult(state.step, finished, *log.last, state.seconds, state.tokens, timer.elapsed)


@contextmanager
def _locked(folder: RunFolder, rendezvous: Rendezvous, options: Mapping[str, Any]) -> Iterator[None]:
    """Hold the folder's lock on the main rank.

    Raises ValueError on every rank if the folder is already locked, if ranks have different options, or if they do not
    share the folder.
    """
    with ExitStack() as stack:
        rendezvous.from_main(lambda: stack.enter_context(folder.lock()))
        rendezvous.require_equal(options, SAME_COMMAND)
        lock = folder.path / LOCK
        end = time.monotonic() + SHARED_WITHIN
        while not lock.exists() and time.monotonic() < end:
            time.sleep(0.1)
        seen = {str(lock): lock.read_text(encoding="utf-8") if lock.exists() else None}
        rendezvous.require_equal(seen, "put the run folder on a file system that all ranks share")
        yield

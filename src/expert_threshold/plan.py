"""Estimates a run's costs (parameters, tokens, FLOPs, memory, time and money) without allocating its weights."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from .config import RunConfig
from .distributed import LocalBatch, competes_on_rank, local_batch
from .model import GPT, flops_per_token, parameter_counts
from .model.memory import FLOAT32, Memory, Step, backend, moments
from .optim import make_optimizers
from .optim.muon import BATCH_ELEMENTS
from .option import Count, NonNegative, Positive, Share, option
from .routing import Window, rule_name

LAYOUTS = ("replicate", "shard", "expert_parallel")
"""Layouts of a run over several GPUs. With `replicate`, each GPU holds all weights and a share of the optimizer's
state. With `shard`, it holds a share of everything; with `expert_parallel`, it holds a share of the experts."""


@dataclass(frozen=True)
class Machine:
    """The GPUs of a run."""

    gpus: Count = option(1, "Number of GPUs that share the batch.")
    micro_batch: Count | None = option(None, "Sequences per micro-batch. Defaults to a GPU's share of --batch-size.")
    utilisation: Share = option(0.4, "Model FLOPs utilisation (MFU), as a share of the peak.")
    peak_tflops: Positive = option(989.0, "Peak TFLOPS of one GPU. Defaults to the peak of an H100.")
    price_per_gpu_hour: NonNegative = option(2.5, "Price per GPU-hour, in any currency.")


ONE_GPU = Machine()


def costs(config: RunConfig, machine: Machine = ONE_GPU) -> dict[str, Any]:
    """Return a run's parameter counts, tokens, pool sizes, and FLOPs in forward and backward."""
    parameters, rule = parameter_counts(config.model), config.model.rule
    assumed = None
    if rule is not None and not rule.aims_at_fanout:
        fanout = f"active parameters and FLOPs assume a fanout of {rule.experts_per_token:g}"
        assumed = f"{rule_name(rule)} has no fixed mean fanout; {fanout}"
    per_token = flops_per_token(config.model)
    tokens_per_step = config.train.batch_size * config.train.accumulation * config.model.context
    tokens = config.train.steps * tokens_per_step
    pool, effective = window(config, share_out(config, machine))
    return {
        "rule": rule_name(rule),
        "params_total": parameters.pop("total"),
        "params_active": parameters.pop("active"),
        "parameters": parameters,
        "flops_per_token": per_token,
        "steps": config.train.steps,
        "tokens_per_step": tokens_per_step,
        "tokens": tokens,
        "pool": pool,
        "effective_pool": effective,
        "flops_total": per_token * tokens,
        "assumed": assumed,
    }


def window(config: RunConfig, local: LocalBatch | None = None) -> Window:
    """Return how many tokens the rule looks at in training. Both numbers are None for a dense model.

    local: the part of a step that one rank processes, or None if there is only one rank.
    """
    rule, context = config.model.rule, config.model.context
    if rule is None:
        return Window(None, None)
    step = config.train.batch_size * config.train.accumulation * context
    pooled = config.train.batch_size if local is None else local.pooled
    return rule.window(context, pooled * context, step)


def duration(config: RunConfig, machine: Machine) -> dict[str, float]:
    """Return how long the run takes and how much it costs. Raises ValueError if either is infinite."""
    rate = machine.gpus * machine.utilisation * machine.peak_tflops * 1e12
    hours = costs(config)["flops_total"] / rate / 3600 if rate > 0 else math.inf
    if math.isinf(3600 * hours):
        raise ValueError(f"--peak-tflops {machine.peak_tflops}: the run would never finish; pass the peak of one GPU")
    cost = hours * machine.gpus * machine.price_per_gpu_hour
    if math.isinf(cost):
        raise ValueError(f"--price-per-gpu-hour {machine.price_per_gpu_hour}: the cost overflows; use a lower price")
    return {
        "tokens_per_second": rate / flops_per_token(config.model),
        "hours": hours,
        "gpu_hours": hours * machine.gpus,
        "cost": cost,
    }


def share_out(config: RunConfig, machine: Machine) -> LocalBatch:
    """Return one GPU's part of a step, which is the same as in training unless `micro_batch` is given.

    Raises ValueError if the step cannot be divided evenly.
    """
    batch_size, accumulation = config.train.batch_size, config.train.accumulation
    step = batch_size * accumulation
    if machine.gpus > step:
        raise ValueError(f"--gpus {machine.gpus}: a step has only {step} sequences; use at most {step} GPUs")
    if step % machine.gpus:
        raise ValueError(f"--gpus {machine.gpus} does not divide a step of {step} sequences; use a divisor of {step}")
    micro_batch = machine.micro_batch
    if micro_batch is None:
        try:
            return local_batch(batch_size, accumulation, config.model.rule, machine.gpus)
        except ValueError as error:
            raise ValueError(f"--gpus {machine.gpus}: {error}") from None
    if step % (micro_batch * machine.gpus):
        raise ValueError(
            f"--micro-batch {micro_batch} on {machine.gpus} GPUs does not divide a step of {step} sequences; "
            f"use a divisor of {step // machine.gpus}"
        )
    alone = competes_on_rank(config.model.rule)
    return LocalBatch(micro_batch, step // (micro_batch * machine.gpus), machine.gpus, joint_mean=not alone)


def memory(config: RunConfig, machine: Machine, dtype: torch.dtype, *, gpu: bool) -> dict[str, dict[str, int]]:
    """Return one GPU's memory in bytes at its peak, keyed by layout and then by part, with the total as `peak`.

    dtype: the dtype of matrix multiplications. The allocator's overhead is not included.
    """
    gpus, rule, local = machine.gpus, config.model.rule, share_out(config, machine)
    tokens = local.batch_size * config.model.context
    dispatch = backend(config.model, tokens, dtype, gpu=gpu)
    pairs = 0 if rule is None else round(tokens * rule.experts_per_token)
    bound = (None if rule is None else rule.max_pairs(tokens, training=True, ranks=gpus)) or pairs
    step = Step(
        tokens=tokens,
        rows=bound if dispatch in ("static", "triton") else pairs,
        dtype=dtype,
        gpu=gpu,
        dispatch=dispatch,
        checkpointing=config.train.activation_checkpointing,
        accumulates=local.accumulation > 1,
    )
    in_step = moments(config.model, step)

    with torch.device("meta"):
        model = GPT(config.model, dtype)
    optimizers = make_optimizers(model.named_parameters(), config.optim, config.model.d_model)
    state = sum(tensor.nbytes for tensor in optimizers.tensors().values()) // gpus
    # Muon works on one batch of matrices at a time, with its lookahead momentum, two iterates and Gram matrices.
    alike: Counter[torch.Size] = Counter()
    for weight in model.parameters():
        alike[weight.shape[-2:]] += weight.numel()
    batch = min(BATCH_ELEMENTS["gpu" if gpu else "cpu"], max(alike.values()))
    muon = batch * 2 * (FLOAT32 + dtype.itemsize)

    blocks = [sum(weight.numel() for weight in block.parameters()) for block in model.blocks]
    counts = parameter_counts(config.model)
    total, routed, within = counts["total"], counts["routed_experts"], sum(blocks)
    split = 1 if rule is None else config.train.expert_parallel
    if rule is not None and split == 1:  # assume that experts are split as far as the GPUs allow
        split = math.gcd(gpus, rule.num_experts)
    sent = 2 * bound * config.model.d_model * dtype.itemsize  # tokens are sent, received and sent back
    found = {}
    for layout in LAYOUTS[:1] if gpus == 1 else LAYOUTS:
        held = {"replicate": total, "shard": -(-total // gpus)}.get(layout, total - routed + routed // split)
        here = [moment._replace(gradients=moment.gradients * held // total) for moment in in_step]
        if layout == "shard":  # two blocks are gathered at a time, and the gradients of one are whole
            casts, whole = 2 * max(blocks) * dtype.itemsize, max(blocks) * FLOAT32
            here = [moment._replace(casts=casts, gradients=moment.gradients + whole) for moment in here]
        elif layout == "expert_parallel" and routed:
            share = 1 - (total - held) / within
            here = [m._replace(casts=round(m.casts * share), dispatch=m.dispatch + sent) for m in here]
        most, at_update = max(here, key=sum), Memory(gradients=FLOAT32 * held)
        moment, optimizer = (most, state) if most.total >= at_update.total + muon else (at_update, state + muon)
        parts = {"weights": FLOAT32 * held, "optimizer": optimizer, **moment._asdict()}
        found[layout] = parts | {"peak": sum(parts.values())}
    return found

"""Costs of a run, without allocating a weight: parameters, tokens, FLOPs, memory, time and money."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from .config import RunConfig
from .model import GPT, flops_per_token, parameter_counts
from .model.memory import FLOAT32, Memory, Step
from .optim import make_optimizers
from .optim.muon import BATCH_ELEMENTS
from .routing import Window, rule_name

LAYOUTS = ("replicate", "shard", "expert_parallel")
"""Layouts: each GPU holds all weights and its share of the optimizer's state; a share of everything; a share of the
experts, at least one."""


def costs(config: RunConfig) -> dict[str, Any]:
    """Return parameters in total, active and by part; tokens, of a pool too; model FLOPs of forward and backward."""
    parameters = parameter_counts(config.model)
    per_token = flops_per_token(config.model)
    tokens_per_step = config.train.batch_size * config.train.accumulation * config.model.context
    tokens = config.train.steps * tokens_per_step
    pool, effective = window(config)
    return {
        "rule": rule_name(config.model.rule),
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
    }


def window(config: RunConfig) -> Window:
    """Return the tokens that the rule looks at in training; both are None for a dense model."""
    rule, micro_batch = config.model.rule, config.train.batch_size * config.model.context
    if rule is None:
        return Window(None, None)
    return rule.window(config.model.context, micro_batch, micro_batch * config.train.accumulation)


class Machine(NamedTuple):
    """GPUs and their use. utilisation: model FLOPs as a share of the peak."""

    gpus: int = 1
    micro_batch: int | None = None  # sequences per GPU; None splits the run's batch size
    utilisation: float = 0.4
    peak_tflops: float = 989.0
    price_per_gpu_hour: float = 2.5


def duration(config: RunConfig, machine: Machine) -> dict[str, float]:
    """Return the hours, and their cost."""
    rate = machine.gpus * machine.utilisation * machine.peak_tflops * 1e12
    hours = costs(config)["flops_total"] / rate / 3600
    return {
        "tokens_per_second": rate / flops_per_token(config.model),
        "hours": hours,
        "gpu_hours": hours * machine.gpus,
        "cost": hours * machine.gpus * machine.price_per_gpu_hour,
    }


def share_out(config: RunConfig, machine: Machine) -> tuple[int, int]:
    """Return the sequences per GPU and micro-batch, and the micro-batches per step.

    Raises ValueError if the step cannot be divided evenly.
    """
    step = config.train.batch_size * config.train.accumulation
    if machine.gpus > step:
        raise ValueError(f"--gpus {machine.gpus}: a step has {step} sequences; give at most as many GPUs")
    rule, whole = config.model.rule, config.train.batch_size
    # A loss over one rank's micro-batch would change with the size of that micro-batch.
    by_loss = rule is not None and rule.scope(training=True) == "token" and rule.pool_scope() == "batch"
    shared = whole if by_loss else max(whole // machine.gpus, 1)
    micro_batch = machine.micro_batch or shared
    if step % (micro_batch * machine.gpus):
        raise ValueError(
            f"--micro-batch {micro_batch} on {machine.gpus} GPUs does not divide the step of {step} sequences; "
            f"give a divisor of {step // machine.gpus}"
        )
    return micro_batch, step // (micro_batch * machine.gpus)


def dispatch(config: RunConfig, machine: Machine, itemsize: int, *, gpu: bool) -> str | None:
    """Return the backend that `auto` will choose; None for a dense model."""
    step = Step(config.model, share_out(config, machine)[0], itemsize, gpu, machine.gpus)
    return None if config.model.rule is None else step.dispatch


def memory(config: RunConfig, machine: Machine, itemsize: int, *, gpu: bool, layout: str) -> dict[str, int]:
    """Return the bytes on one GPU at the peak, by part and in total, as `peak`; the allocator's overhead comes on top.

    itemsize: bytes per number in the compute dtype. gpu: False for a CPU.
    """
    micro_batch, accumulation = share_out(config, machine)
    step = Step(config.model, micro_batch, itemsize, gpu, machine.gpus)
    with torch.device("meta"):
        model = GPT(config.model)
    whole = _parameters(model)
    held = [_held(part, layout, machine.gpus, config) for part in whole]
    gradients = [FLOAT32 * count for count in held]
    moment = step.peak(gradients, accumulated=accumulation > 1, checkpointing=config.train.activation_checkpointing)
    optimizers = make_optimizers(model.named_parameters(), config.optim, config.model.d_model)
    state = sum(tensor.nbytes for tensor in optimizers.tensors().values())
    state //= machine.gpus
    # The batch that Muon works on: the momentum's lookahead, two iterates and their Gram matrices.
    muon = BATCH_ELEMENTS["gpu" if gpu else "cpu"] * 2 * (FLOAT32 + itemsize)
    if sum(gradients) + muon > moment.total:
        moment, state = Memory(gradients=sum(gradients)), state + muon
    elif machine.gpus > 1:
        moment = moment + _beside(step, moment, whole, held, layout)
    parts = {"weights": FLOAT32 * sum(held), "optimizer": state, **moment._asdict()}
    return parts | {"peak": sum(parts.values())}


def _beside(step: Step, moment: Memory, whole: list[tuple[int, int]], held: list[int], layout: str) -> Memory:
    """Return the difference in memory between a layout and one with all weights."""
    if layout == "shard":  # two blocks are gathered at a time, and the gradients of one are whole
        largest = max(map(sum, whole[1:]))
        return Memory(casts=2 * largest * step.itemsize - moment.casts, gradients=largest * FLOAT32)
    if layout == "expert_parallel" and step.config.rule is not None:  # tokens are sent, received, and sent back
        there = sum(map(sum, whole[1:]))
        rows = 2 * step.slots * step.config.d_model * step.itemsize
        return Memory(casts=moment.casts * sum(held[1:]) // there - moment.casts, dispatch=rows)
    return Memory()


def _parameters(model: GPT) -> list[tuple[int, int]]:
    """Return pairs (other weights, weights of routed experts): embedding and head together, then each block."""
    outside = model.embed.weight.numel() + model.head.weight.numel()
    all_of_it = [sum(weight.numel() for weight in block.parameters()) for block in model.blocks]
    experts = [0] * len(all_of_it)
    for layer, moe in model.moe_layers():
        experts[layer] = sum(weight.numel() for weight in moe.experts.parameters())
    return [(outside, 0), *((whole - part, part) for whole, part in zip(all_of_it, experts, strict=True))]


def _held(part: tuple[int, int], layout: str, gpus: int, config: RunConfig) -> int:
    """Return the number of a part's weights that one GPU holds."""
    others, experts = part
    if layout == "shard":
        return -(-(others + experts) // gpus)
    if layout == "expert_parallel" and config.model.rule is not None:
        return others + experts // math.gcd(gpus, config.model.rule.num_experts)
    return others + experts

"""Costs of a run, without allocating a weight: parameters, tokens, FLOPs, memory, time and money."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from .config import RunConfig
from .distributed import LocalBatch, competes_on_rank, local_batch
from .errors import needs_data
from .kernels.planned import Planned, planned
from .model import GPT, GPTConfig, flops_per_token, parameter_counts
from .model.memory import LiveBytes, Memory
from .optim import make_optimizers
from .optim.muon import BATCH_ELEMENTS
from .routing import Rule, TokenChoice, Window, rule_name

FLOAT32 = 4  # bytes
LAYOUTS = ("replicate", "shard", "expert_parallel")
"""Layouts: each GPU holds all weights and its share of the optimizer's state; a share of everything; a share of the
experts, at least one."""


class Machine(NamedTuple):
    """GPUs and their use. utilisation: model FLOPs as a share of the peak."""

    gpus: int = 1
    micro_batch: int | None = None  # sequences per GPU; None splits the run's batch size
    utilisation: float = 0.4
    peak_tflops: float = 989.0
    price_per_gpu_hour: float = 2.5


ONE_GPU = Machine()


def costs(config: RunConfig, machine: Machine = ONE_GPU) -> dict[str, Any]:
    """Return parameters (total, active, by part), tokens (of a pool too) and model FLOPs of forward and backward."""
    parameters = parameter_counts(config.model)
    per_token = flops_per_token(config.model)
    tokens_per_step = config.train.batch_size * config.train.accumulation * config.model.context
    tokens = config.train.steps * tokens_per_step
    pool, effective = window(config, share_out(config, machine))
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
        "assumed": assumed_fanout(config.model.rule),
    }


def assumed_fanout(rule: Rule | None) -> str | None:
    """Return a sentence for a rule whose mean fanout may be any; None for others, and for a dense model."""
    if rule is None or rule.aims_at_fanout:
        return None
    return (
        f"{rule_name(rule)} has no fixed mean fanout; active parameters and FLOPs are those of a fanout of "
        f"{rule.experts_per_token:g}"
    )


def window(config: RunConfig, local: LocalBatch | None = None) -> Window:
    """Return the tokens that the rule looks at in training; both are None for a dense model.

    local: a rank's part of a step; None: there is one rank.
    """
    rule, context = config.model.rule, config.model.context
    if rule is None:
        return Window(None, None)
    step = config.train.batch_size * config.train.accumulation * context
    pooled = config.train.batch_size if local is None else local.pooled
    return rule.window(context, pooled * context, step)


def duration(config: RunConfig, machine: Machine) -> dict[str, float]:
    """Return the hours, and their cost. Raises ValueError if they are infinite."""
    rate = machine.gpus * machine.utilisation * machine.peak_tflops * 1e12
    hours = costs(config)["flops_total"] / rate / 3600 if rate > 0 else math.inf
    if math.isinf(3600 * hours):
        raise ValueError(f"--peak-tflops {machine.peak_tflops}: the run would never end; give the peak of one GPU")
    cost = hours * machine.gpus * machine.price_per_gpu_hour
    if math.isinf(cost):
        raise ValueError(f"--price-per-gpu-hour {machine.price_per_gpu_hour}: the cost is beyond counting; give less")
    return {
        "tokens_per_second": rate / flops_per_token(config.model),
        "hours": hours,
        "gpu_hours": hours * machine.gpus,
        "cost": cost,
    }


def share_out(config: RunConfig, machine: Machine) -> LocalBatch:
    """Return one GPU's part of a step, as in training unless `micro_batch` says otherwise.

    Raises ValueError if the step cannot be divided evenly.
    """
    batch_size, accumulation = config.train.batch_size, config.train.accumulation
    step = batch_size * accumulation
    if machine.gpus > step:
        raise ValueError(f"--gpus {machine.gpus}: a step has {step} sequences; give at most as many GPUs")
    if step % machine.gpus:
        raise ValueError(f"--gpus {machine.gpus}: does not divide the step of {step} sequences; give a divisor of it")
    micro_batch = machine.micro_batch
    if micro_batch is None:
        try:
            return local_batch(batch_size, accumulation, config.model.rule, machine.gpus)
        except ValueError as error:
            raise ValueError(f"--gpus {machine.gpus}: {error}") from None
    if step % (micro_batch * machine.gpus):
        raise ValueError(
            f"--micro-batch {micro_batch} on {machine.gpus} GPUs does not divide the step of {step} sequences; "
            f"give a divisor of {step // machine.gpus}"
        )
    alone = competes_on_rank(config.model.rule)
    return LocalBatch(micro_batch, step // (micro_batch * machine.gpus), machine.gpus, joint_mean=not alone)


def dispatch(config: RunConfig, machine: Machine, itemsize: int, *, gpu: bool) -> str | None:
    """Return the backend that `auto` will choose; None for a model without experts."""
    model = _without_data(config.model, itemsize)
    x = torch.empty(share_out(config, machine).batch_size * config.model.context, config.model.d_model, device="meta")
    with _assumed(config, machine, gpu=gpu):
        for _, moe in model.moe_layers():
            return moe.dispatch.chosen(x.to(model.compute_dtype), moe.experts, moe.max_pairs(len(x))).name
    return None


def memory(
    config: RunConfig, machine: Machine, itemsize: int, *, gpu: bool, layouts: Sequence[str] = LAYOUTS
) -> dict[str, dict[str, int]]:
    """Return the bytes on one GPU at the peak in each layout, by part and in total, as `peak`.

    itemsize: bytes per number in the compute dtype. gpu: False for a CPU. The allocator's overhead comes on top.
    """
    # Triton need not be installed where a plan is made; its buffers have as many rows as those of static.
    triton = config.model.dispatch == "triton"
    model = _without_data(replace(config.model, dispatch="static") if triton else config.model, itemsize)
    whole = _parameters(model)
    optimizers = make_optimizers(model.named_parameters(), config.optim, config.model.d_model)
    state = sum(tensor.nbytes for tensor in optimizers.tensors().values()) // machine.gpus
    # The batch that Muon works on: the momentum's lookahead, two iterates and their Gram matrices.
    alike: Counter[torch.Size] = Counter()
    for weight in model.parameters():
        alike[weight.shape[-2:]] += weight.numel()
    muon = min(BATCH_ELEMENTS["gpu" if gpu else "cpu"], max(alike.values())) * 2 * (FLOAT32 + itemsize)
    try:
        moments = _measured(model, config, machine, gpu=gpu)
    except (RuntimeError, TypeError) as error:
        rule = config.model.rule
        if rule is None or not needs_data(error):
            raise
        # A rule that looks at its scores cannot route what has no data; pairs are counted as for token choice.
        stand_in = TokenChoice(rule.num_experts, min(max(round(rule.experts_per_token), 1), rule.num_experts))
        moments = _measured(_without_data(replace(model.config, rule=stand_in), itemsize), config, machine, gpu=gpu)
    found = {}
    for layout in layouts:
        held = [_held(part, layout, machine.gpus, config) for part in whole]
        at_update = Memory(gradients=FLOAT32 * sum(held))
        here = (_laid_out(moment, whole, held, layout, config, machine, itemsize) for moment in moments)
        in_step = max(here, key=sum)
        moment, optimizer = (in_step, state) if in_step.total >= at_update.total + muon else (at_update, state + muon)
        parts = {"weights": FLOAT32 * sum(held), "optimizer": optimizer, **moment._asdict()}
        found[layout] = parts | {"peak": sum(parts.values())}
    return found


def _without_data(config: GPTConfig, itemsize: int) -> GPT:
    with torch.device("meta"):
        return GPT(config, torch.float32 if itemsize == FLOAT32 else torch.bfloat16)


def _assumed(config: RunConfig, machine: Machine, *, gpu: bool) -> AbstractContextManager[None]:
    rule = config.model.rule
    return planned(Planned(cpu=not gpu, fanout=0 if rule is None else rule.experts_per_token, ranks=machine.gpus))


def _measured(model: GPT, config: RunConfig, machine: Machine, *, gpu: bool) -> list[Memory]:
    """Return the memory after each operator of a step's last forward and backward, with all weights on one device."""
    model.activation_checkpointing = config.train.activation_checkpointing
    local = share_out(config, machine)
    if local.accumulation > 1:
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
    kinds: dict[nn.Module | str, str] = {"expert_threshold::cross_entropy": "logits"}
    for _, moe in model.moe_layers():
        kinds |= {moe: "dispatch"} if moe.shared is None else {moe: "dispatch", moe.shared: "activations"}
    tokens = torch.empty(local.batch_size, config.model.context, dtype=torch.int64, device="meta")
    with _assumed(config, machine, gpu=gpu), LiveBytes(model, kinds) as live:
        output = model(tokens, tokens)
        assert output.loss is not None
        output.loss.backward()
    return live.moments


def _laid_out(
    moment: Memory,
    whole: list[tuple[int, int]],
    held: list[int],
    layout: str,
    config: RunConfig,
    machine: Machine,
    itemsize: int,
) -> Memory:
    """Return a moment in a layout, from one measured with all weights on one device."""
    moment = moment._replace(gradients=moment.gradients * sum(held) // sum(map(sum, whole)))
    if machine.gpus == 1:
        return moment
    if layout == "shard":  # two blocks are gathered at a time, and the gradients of one are whole
        largest = max(map(sum, whole[1:]))
        return moment._replace(casts=2 * largest * itemsize, gradients=moment.gradients + largest * FLOAT32)
    if layout == "expert_parallel" and any(experts for _, experts in whole):  # tokens are sent, received, and sent back
        assert config.model.rule is not None
        tokens, rule = share_out(config, machine).batch_size * config.model.context, config.model.rule
        rows = rule.max_pairs(tokens, training=True, ranks=machine.gpus) or round(tokens * rule.experts_per_token)
        casts = moment.casts * sum(held[1:]) // sum(map(sum, whole[1:]))
        return moment._replace(casts=casts, dispatch=moment.dispatch + 2 * rows * config.model.d_model * itemsize)
    return moment


def expert_parallel(config: RunConfig, gpus: int) -> int:
    """Return among how many GPUs the layout of that name splits the experts: as the run says, else as many as can."""
    assert config.model.rule is not None
    asked = config.train.expert_parallel
    return asked if asked > 1 else math.gcd(gpus, config.model.rule.num_experts)


def _parameters(model: GPT) -> list[tuple[int, int]]:
    """Return pairs (other weights, weights of routed experts): those outside of blocks together, then each block's."""
    all_of_it = [sum(weight.numel() for weight in block.parameters()) for block in model.blocks]
    outside = sum(weight.numel() for weight in model.parameters()) - sum(all_of_it)
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
        return others + experts // expert_parallel(config, gpus)
    return others + experts

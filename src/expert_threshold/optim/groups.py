"""Assigns optimizers, learning rates and schedules to parameters (the paper's appendix, Training Setup Details).

To add an optimizer, write a `torch.optim.Optimizer` with a method `initial_state`, add an entry to OPTIMIZERS, and
assign parameters to it in GROUPS.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .adamw import AdamW
from .config import OptimConfig
from .muon import Muon

MOMENTUM_START = 0.85
"""Muon's momentum at the first step, in the paper and in nanochat."""
NORMUON_BETA = 0.9
"""Decay of NorMuon's second moments, as in nanochat."""

# Learning rates, momentum and weight decay as functions of the step and of the progress in the schedule.


def falling(progress: float, steps: int, end: float, cooldown: float) -> float:
    """Return the fraction of the peak at `progress` of `steps`: 1 until the cooldown, then a linear decay to `end`.

    cooldown: the length of the cooldown as a share of the steps; 1 is the paper's schedule.
    """
    if cooldown == 1:
        return 1 + (end - 1) * progress / steps  # as below, up to rounding
    return end + (1 - end) * min(1.0, 1 / cooldown * (steps - progress) / steps)


def warmup(step: int, warmup_steps: int) -> float:
    """Return (step + 1) / warmup_steps, but at most 1. It is above 0 even at step 0."""
    return min(1.0, (step + 1) / max(1, warmup_steps))


def momentum_at(step: int, progress: float, steps: int, config: OptimConfig) -> float:
    """Return Muon's momentum, which rises linearly from MOMENTUM_START to `momentum` over `momentum_warmup_steps`.

    If `momentum_end` is set, the momentum then approaches it in proportion to the decay of the learning rates.
    """
    risen = min(1.0, step / config.momentum_warmup_steps) if config.momentum_warmup_steps else 1.0
    momentum = (1 - risen) * MOMENTUM_START + risen * config.momentum
    if config.momentum_end is None:
        return momentum
    left = falling(progress, steps, 0.0, config.cooldown)
    return left * momentum + (1 - left) * config.momentum_end


def weight_decay_at(progress: float, steps: int, config: OptimConfig) -> float:
    """Return the weight decay at `progress` of `steps`, which follows half a cosine from the configured value to 0."""
    return config.weight_decay * (1 + math.cos(math.pi * progress / steps)) / 2


NS_DTYPES: dict[str, torch.dtype | None] = {"auto": None, "bfloat16": torch.bfloat16, "float32": torch.float32}


class Optimizer(Protocol):
    """A `torch.optim.Optimizer` that knows its initial state, so that a run can save and restore it at any step."""

    param_groups: list[dict[str, Any]]
    state: defaultdict[Tensor, Any]

    def step(self) -> float | None:
        """Update every parameter that has a gradient, using the options in `param_groups`."""

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return a parameter's state before its first step.

        Its tensors are scalars, or have the parameter's shape with some sizes possibly reduced to 1. Those that are not
        scalars are sharded over ranks like the parameter.
        """


class OptimizerSpec(NamedTuple):
    """An optimizer and the way in which a run uses it."""

    make: Callable[[list[dict[str, Any]], OptimConfig], Optimizer]  # from groups of named parameters
    whole_matrices: bool  # True if an update needs full matrices; otherwise, it is elementwise
    scaled: Callable[[OptimConfig], bool]  # True if λ scales its learning rates
    warmup_steps: Callable[[OptimConfig], int]  # steps over which its learning rates rise
    # (step, progress of the schedule, total steps, config) → options for its parameter groups.
    options: Callable[[int, float, int, OptimConfig], dict[str, Any]]


OPTIMIZERS: dict[str, OptimizerSpec] = {  # the fast one first, to communicate its updates while the slow one computes
    "adamw": OptimizerSpec(
        lambda params, config: AdamW(params, eps=config.eps),
        whole_matrices=False,
        scaled=lambda config: True,
        warmup_steps=lambda config: config.adamw_warmup_steps,
        options=lambda step, progress, steps, config: {},
    ),
    "muon": OptimizerSpec(
        lambda params, config: Muon(
            [part for group in params for part in _in_turns(group, config.expert_period)],
            ns_steps=config.ns_steps,
            ns_dtype=NS_DTYPES[config.ns_dtype],
            orthogonalizer=config.orthogonalizer,
            equilibrate=config.equilibrate,
            renormalize=config.renormalize,
            normuon=config.normuon,
            normuon_beta=NORMUON_BETA,
            cautious=True,
        ),
        whole_matrices=True,
        scaled=lambda config: config.scale_muon,
        warmup_steps=lambda config: config.muon_warmup_steps,
        options=lambda step, progress, steps, config: {
            "momentum": momentum_at(step, progress, steps, config),
            "turn": step,
            "weight_decay": weight_decay_at(progress, steps, config),
        },
    ),
}


def _in_turns(group: dict[str, Any], period: int) -> Iterator[dict[str, Any]]:
    """Split a group of named parameters into parts that Muon updates in the same steps: experts by layer."""
    parts: dict[int | None, list[tuple[str, Tensor]]] = {}
    for name, parameter in group["params"]:
        fields = name.split(".")
        layer = next((int(field) for field in fields if field.isdigit()), 0)
        parts.setdefault(layer % period if period > 1 and "experts" in fields else None, []).append((name, parameter))
    for phase, named in parts.items():
        yield {**group, "params": named, **({} if phase is None else {"period": period, "phase": phase})}


class GroupSpec(NamedTuple):
    """A group of parameters, and how it is optimized. names: names of parameters or of the modules around them."""

    names: Set[str]
    peak: Callable[[OptimConfig], float]  # learning rate, before λ
    optimizer: Callable[[OptimConfig], str] = lambda config: "adamw"
    betas: tuple[float, float] = (0.8, 0.95)  # of AdamW in nanochat
    weight_decay: float = 0.0  # of AdamW in nanochat
    scaled: bool = True  # by λ, if the optimizer's rates are; rates of scalars do not depend on the width


GROUPS: dict[str, GroupSpec] = {  # a parameter belongs to the last group that names it; other matrices are in `matrix`
    "matrix": GroupSpec(set(), lambda config: config.matrix_lr, lambda config: "muon"),
    "expert": GroupSpec({"experts"}, lambda config: config.expert_lr or config.matrix_lr, lambda config: "muon"),
    "embed": GroupSpec({"embed"}, lambda config: config.embed_lr, betas=(0.8, 0.995), weight_decay=0.001),
    "value_embed": GroupSpec(
        {"value_embed"}, lambda config: config.embed_lr / 2, betas=(0.8, 0.995), weight_decay=0.01
    ),
    "head": GroupSpec({"head"}, lambda config: config.head_lr, betas=(0.8, 0.96), weight_decay=0.01),
    "residual": GroupSpec({"residual_scalars"}, lambda config: 0.005, weight_decay=0.05, scaled=False),
    "skip": GroupSpec({"skip_scalars"}, lambda config: config.skip_lr, betas=(0.96, 0.95), scaled=False),
    "smear": GroupSpec({"smear_gate", "smear_scalar", "backout_scalar"}, lambda config: 0.2, scaled=False),
    "router": GroupSpec(
        {"router"}, lambda config: config.router_lr or config.matrix_lr, lambda config: config.router_optimizer
    ),
}


class Group(NamedTuple):
    """Parameters that share a kind of optimizer and a learning rate, whose peak, including λ, is `peak`."""

    kind: str
    peak: float
    parameters: dict[str, Tensor]
    optimizers: list[Optimizer]  # one per matrix shape, so that one's updates are sent while the next one computes


class OptimizerState(NamedTuple):
    """A state from which a run resumes bit for bit: tensors, and scalars such as step counts, keyed by flat names."""

    tensors: dict[str, Tensor]
    counters: dict[str, float]


class Optimizers:
    """All optimizers of a model, which step together. Steps count from 0. groups: the non-empty groups in GROUPS."""

    def __init__(self, groups: Mapping[str, Group], config: OptimConfig) -> None:
        self.groups = dict(groups)
        self.config = config
        for group in self.groups.values():  # so that a checkpoint can be saved or loaded before the first step
            for optimizer in group.optimizers:
                for _, parameter in _members(optimizer):
                    optimizer.state[parameter].update(optimizer.initial_state(parameter))

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters, in the order of their groups."""
        return [parameter for group in self.groups.values() for parameter in group.parameters.values()]

    def learning_rates(self, step: int, steps: int, progress: float | None = None) -> dict[str, float]:
        """Return the learning rate of each group at `step` of `steps`, before Muon scales it by the shape of a matrix.

        progress: the position in the schedule, from 0 to `steps`. Defaults to `step`.
        """
        progress = step if progress is None else progress
        assert 0 <= progress <= steps
        factor = falling(progress, steps, self.config.min_lr_ratio, self.config.cooldown)
        return {
            name: group.peak * factor * warmup(step, OPTIMIZERS[group.kind].warmup_steps(self.config))
            for name, group in self.groups.items()
        }

    def step(
        self,
        step: int,
        steps: int,
        grad_norm: Tensor | None = None,
        moved: Callable[[Collection[str]], None] = lambda names: None,
        progress: float | None = None,
    ) -> None:
        """Clip gradients if `clip` is set, then update every parameter that has a gradient, at `step` of `steps`.

        grad_norm: the gradient norm over all ranks, or None in a single process. moved: called with the names of
        parameters as soon as they have been updated. progress: as in `learning_rates`.
        """
        if self.config.clip is not None:
            norm = self.grad_norm() if grad_norm is None else grad_norm
            nn.utils.clip_grads_with_norm_(self.parameters, self.config.clip, norm)
        learning_rates = self.learning_rates(step, steps, progress)
        for kind, row in OPTIMIZERS.items():
            options = row.options(step, step if progress is None else progress, steps, self.config)
            for name, group in self.groups.items():
                for optimizer in group.optimizers if group.kind == kind else ():
                    for param_group in optimizer.param_groups:
                        param_group.update(options, lr=learning_rates[name])
                    optimizer.step()
                    moved([name for name, _ in _members(optimizer)])

    def zero_grad(self) -> None:
        """Clear all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def grad_norm(self) -> Tensor:
        """Return the Euclidean norm of all gradients as a scalar tensor, which is 0 if there are no gradients."""
        return nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])

    def tensors(self) -> dict[str, Tensor]:
        """Return the state's tensors without copying: `muon.….momentum`, `adamw.….exp_avg`, `adamw.….exp_avg_sq`."""
        return {name: tensor for name, tensor in self._state() if tensor.ndim}

    def state_dict(self) -> OptimizerState:
        """Return the state without copying its tensors."""
        return OptimizerState(self.tensors(), {name: count.item() for name, count in self._state() if not count.ndim})

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor], counters: Mapping[str, float]) -> None:
        """Load a saved state. Raises ValueError, naming the entry, if one does not fit; nothing changes then."""
        mine = dict(self._state())
        saved = {name: torch.as_tensor(value) for name, value in {**tensors, **counters}.items()}
        remedy = "resume with the configuration of the saved run"
        for name in sorted(mine.keys() ^ saved.keys()):
            problem = "is missing" if name in mine else "belongs to no parameter"
            raise ValueError(f"optimizer state: {name} {problem}; {remedy}")
        for name, tensor in mine.items():
            other = saved[name]
            if other.shape != tensor.shape or (tensor.ndim and other.dtype != tensor.dtype):
                raise ValueError(
                    f"optimizer state: {name} is {other.dtype} {tuple(other.shape)} but the model needs "
                    f"{tensor.dtype} {tuple(tensor.shape)}; {remedy}"
                )
        for name, tensor in mine.items():
            tensor.copy_(saved[name])

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        for group in self.groups.values():
            for optimizer in group.optimizers:
                for name, parameter in _members(optimizer):
                    for entry, tensor in optimizer.state[parameter].items():
                        yield f"{group.kind}.{name}.{entry}", tensor


def _members(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for group in optimizer.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)


def make_optimizers(named_parameters: Iterable[tuple[str, Tensor]], config: OptimConfig, d_model: int) -> Optimizers:
    """Return Muon for matrices and stacks (…, out, in), AdamW for the embedding and the head, and either for routers.

    The parameters must already be on their device. Raises ValueError if a parameter, such as a vector, fits no group.
    """
    members: dict[str, dict[str, Tensor]] = {group: {} for group in GROUPS}
    for name, parameter in named_parameters:
        members[_group_of(name, parameter)][name] = parameter
    groups = {group: _group(group, named, config, d_model) for group, named in members.items() if named}
    return Optimizers(groups, config)


def _group(group: str, parameters: dict[str, Tensor], config: OptimConfig, d_model: int) -> Group:
    kind = GROUPS[group].optimizer(config)
    row = OPTIMIZERS[kind]
    scale = (d_model / 768) ** -0.5 if row.scaled(config) and GROUPS[group].scaled else 1
    # Ranks gather updated parameters in this order, so the order must not depend on how many rows a rank owns.
    start = -2 if row.whole_matrices else 1
    by_shape: dict[torch.Size, list[tuple[str, Tensor]]] = {}
    for name, parameter in parameters.items():
        by_shape.setdefault(parameter.shape[start:], []).append((name, parameter))
    own: dict[str, Any] = {}
    if kind == "adamw":
        first, second = GROUPS[group].betas if config.betas == "nanochat" else config.betas
        own["betas"] = float(first), float(second)  # torch rejects integers such as 0
        own["weight_decay"] = GROUPS[group].weight_decay if config.weight_decay else 0.0
    optimizers = [row.make([{"params": alike, **own}], config) for alike in by_shape.values()]
    return Group(kind, GROUPS[group].peak(config) * scale, parameters, optimizers)


def moves_matrices(name: str, parameter: Tensor, config: OptimConfig) -> bool:
    """Return True if the parameter's optimizer needs full matrices, as Muon does. AdamW does not."""
    return OPTIMIZERS[GROUPS[_group_of(name, parameter)].optimizer(config)].whole_matrices


def _group_of(name: str, parameter: Tensor) -> str:
    for group, row in reversed(GROUPS.items()):
        if not row.names.isdisjoint(name.split(".")):
            return group
    if parameter.ndim >= 2:
        return "matrix"
    raise ValueError(
        f"parameter {name} of shape {tuple(parameter.shape)} has no optimizer: Muon is for matrices, AdamW for the "
        "embedding, the head and the router; leave it out of named_parameters and update it yourself"
    )

"""Which parameter gets which optimizer, learning rate and schedule (the paper's appendix, Training Setup Details)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from .adamw import AdamW
from .muon import Moved, Muon, fast_dtype


def linear(step: float, steps: int, end: float) -> float:
    """The peak's fraction at `step` of `steps`: a straight line from 1 to `end`."""
    return 1 + (end - 1) * step / steps


def warmup_stable_decay(step: float, steps: int, end: float) -> float:
    """The peak's fraction at `step` of `steps`: 1, then over the last fifth a straight line to `end`."""
    return end + (1 - end) * min(1.0, 5 * (steps - step) / steps)


def warmup(step: int, warmup_steps: int) -> float:
    """(step + 1) / warmup_steps, at most 1: the first step moves already."""
    return min(1.0, (step + 1) / max(1, warmup_steps))


SCHEDULES: dict[str, Callable[[float, int, float], float]] = {
    "linear": linear,
    "warmup_stable_decay": warmup_stable_decay,
}
OPTIMIZERS = ("muon", "adamw")
LARGEST = 1e30  # of learning rates and the like: scaled, it is a float32 still
NS_DTYPES: dict[str, torch.dtype | None] = {"auto": None, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class OptimConfig:
    """Optimizers and schedules; the defaults are the paper's. Learning rates are peaks at d_model 768.

    Warmups are counts of steps and are not scaled to the length of a run: short runs set shorter ones.
    """

    # Learning rate of all matrices but the embedding, the head and the router.
    matrix_lr: float = 0.02
    # Learning rate of the embedding.
    embed_lr: float = 0.2
    # Learning rate of the head.
    head_lr: float = 0.004
    # Learning rate of the routers; None is the matrices'.
    router_lr: float | None = None
    # Optimizer of the routers.
    router_optimizer: Literal["muon", "adamw"] = "muon"
    # AdamW's decay of the first and of the second moment.
    betas: tuple[float, float] = (0.9, 0.95)
    # AdamW's epsilon.
    eps: float = 1e-10
    # Steps over which AdamW's learning rates rise from 0 (Muon's start at the peak).
    adamw_warmup_steps: int = 250
    # Muon's momentum.
    momentum: float = 0.95
    # Muon's momentum at the first step.
    momentum_start: float = 0.85
    # Steps over which Muon's momentum goes from its start to its value.
    momentum_warmup_steps: int = 300
    # Newton-Schulz iterations in each Muon step.
    ns_steps: int = 5
    # Type of the Newton-Schulz products; auto is bfloat16 where the hardware has it.
    ns_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    # Course of the learning rates: a straight line down, or constant until the last fifth.
    schedule: Literal["linear", "warmup_stable_decay"] = "linear"
    # Where the schedule ends, as a fraction of the peak.
    min_lr_ratio: float = 0.1
    # Largest global norm of the gradients, above which they are scaled down; None is off.
    clip: float | None = None
    # Scale Muon's learning rates by λ = (d_model / 768)^(−1/2) too, as AdamW's always are.
    scale_muon: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError for a value that cannot train."""
        object.__setattr__(self, "betas", tuple(self.betas))  # JSON has lists only
        for option in ("matrix_lr", "embed_lr", "head_lr", "router_lr", "eps", "clip"):
            value = vars(self)[option]
            if value is None and option in ("router_lr", "clip"):
                continue
            _require(0 < value < LARGEST, option, value, f"use a positive number below {LARGEST:g}")
        for option in ("momentum", "momentum_start"):
            value = vars(self)[option]
            _require(0 <= value < 1, option, value, "use a number from 0 to below 1")
        _require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            "betas",
            self.betas,
            "use two numbers from 0 to below 1",
        )
        _require(0 <= self.min_lr_ratio <= 1, "min_lr_ratio", self.min_lr_ratio, "use a number from 0 to 1")
        for option in ("adamw_warmup_steps", "momentum_warmup_steps"):
            _require(vars(self)[option] >= 0, option, vars(self)[option], "use 0 (off) or more")
        _require(self.ns_steps >= 1, "ns_steps", self.ns_steps, "use 1 or more; the paper has 5")
        choices: dict[str, Iterable[str]] = {
            "router_optimizer": OPTIMIZERS,
            "ns_dtype": NS_DTYPES,
            "schedule": SCHEDULES,
        }
        for option, names in choices.items():
            _require(vars(self)[option] in names, option, vars(self)[option], f"use one of {', '.join(names)}")


def _require(holds: bool, option: str, value: Any, remedy: str) -> None:
    if not holds:
        raise ValueError(f"{option}={value!r} is not possible: {remedy}")


# The optimizer of the authors' release, which differs from the paper's tables. The routers are in the head's group.
RELEASE = OptimConfig(
    router_lr=0.004,
    router_optimizer="adamw",
    betas=(0.8, 0.95),
    adamw_warmup_steps=0,
    schedule="warmup_stable_decay",
    min_lr_ratio=0.0,
    clip=1.0,
    scale_muon=False,
)


def momentum_at(step: int, config: OptimConfig) -> float:
    """Muon's momentum at `step`: a straight line from momentum_start at 0 to momentum at momentum_warmup_steps."""
    risen = min(1.0, step / config.momentum_warmup_steps) if config.momentum_warmup_steps else 1.0
    return (1 - risen) * config.momentum_start + risen * config.momentum


class Group(NamedTuple):
    """Parameters that share an optimizer and a learning rate; `peak` is that of the schedule, λ included."""

    optimizer: Muon | AdamW
    peak: float


class OptimizerState(NamedTuple):
    """All that a run needs to go on, bit for bit: tensors by flat name, and AdamW's step counts."""

    tensors: dict[str, Tensor]
    counters: dict[str, int]


class Optimizers:
    """All optimizers of a model, stepped together; steps count from 0. Groups: matrix, embed, head, router."""

    def __init__(self, groups: Mapping[str, Group], config: OptimConfig) -> None:
        self.groups = dict(groups)
        self.config = config

    @property
    def parameters(self) -> list[Tensor]:
        """Every parameter, group by group."""
        return [parameter for group in self.groups.values() for parameter in group.optimizer.parameters.values()]

    def learning_rates(self, step: int, steps: int, place: float | None = None) -> dict[str, float]:
        """The learning rate of each group at `step` of `steps`, before Muon's scaling by a matrix's shape.

        place: where the step is on the schedule of so many steps, if not at its own number.
        """
        place = step if place is None else place
        assert 0 <= place <= steps
        factor = SCHEDULES[self.config.schedule](place, steps, self.config.min_lr_ratio)
        rising = warmup(step, self.config.adamw_warmup_steps)
        return {
            name: group.peak * factor * (rising if isinstance(group.optimizer, AdamW) else 1)
            for name, group in self.groups.items()
        }

    def step(
        self,
        step: int,
        steps: int,
        grad_norm: Tensor | None = None,
        moved: Moved = lambda names: None,
        place: float | None = None,
    ) -> None:
        """Clip if asked to, then move every parameter that has a gradient by the schedule's `step` of `steps`.

        grad_norm: of the gradients of all ranks; None where there are no others. moved: told the names of parameters
        as soon as they have moved. place: as `learning_rates` has it.
        """
        if self.config.clip is not None:
            norm = self.grad_norm() if grad_norm is None else grad_norm
            nn.utils.clip_grads_with_norm_(self.parameters, self.config.clip, norm)
        learning_rates = self.learning_rates(step, steps, place)
        for name, group in self.groups.items():
            if isinstance(group.optimizer, AdamW):  # quick: what it moved travels while Muon is at work
                group.optimizer.step(learning_rates[name])
                moved(group.optimizer.parameters.keys())
        for name, group in self.groups.items():
            if isinstance(group.optimizer, Muon):
                group.optimizer.step(learning_rates[name], momentum_at(step, self.config), moved)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def grad_norm(self) -> Tensor:
        """The global Euclidean norm of the gradients, a scalar; 0 where there are none."""
        return nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])

    def state_dict(self) -> OptimizerState:
        """The state, its tensors not copied: `muon.….momentum`, `adamw.….exp_avg`, `adamw.….exp_avg_sq`."""
        tensors: dict[str, Tensor] = {}
        for group in self.groups.values():
            tensors |= group.optimizer.tensors()
        return OptimizerState(tensors, {name: int(count.item()) for name, count in self._counts().items()})

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor], counters: Mapping[str, int]) -> None:
        """Copy a saved state in. ValueError names the first entry that does not fit; then nothing has changed."""
        mine, my_counters = self.state_dict()
        _require_same_names(mine, tensors)
        _require_same_names(my_counters, counters)
        for name, tensor in mine.items():
            other = tensors[name]
            if (other.shape, other.dtype) != (tensor.shape, tensor.dtype):
                raise ValueError(
                    f"optimizer state: {name} is {other.dtype} {tuple(other.shape)} but the model needs "
                    f"{tensor.dtype} {tuple(tensor.shape)}: resume with the configuration that it was saved with"
                )
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])
        for name, count in self._counts().items():
            count.fill_(counters[name])

    def _counts(self) -> dict[str, Tensor]:
        return {
            f"adamw.{name}.step": count
            for group in self.groups.values()
            if isinstance(group.optimizer, AdamW)
            for name, count in group.optimizer.steps.items()
        }


def _require_same_names(needed: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    for name in sorted(needed.keys() ^ given.keys()):
        problem = "is missing" if name in needed else "belongs to no parameter"
        raise ValueError(f"optimizer state: {name} {problem}: resume with the configuration that it was saved with")


def make_optimizers(named_parameters: Iterable[tuple[str, Tensor]], config: OptimConfig, d_model: int) -> Optimizers:
    """Muon for matrices and stacks of them (…, out, in), AdamW for embedding and head, either for the routers.

    Call it once the parameters are on their device. ValueError for a parameter that fits nowhere, as a vector would.
    """
    parameters: dict[str, dict[str, Tensor]] = {}
    for name, parameter in named_parameters:
        parameters.setdefault(_group_of(name, parameter), {})[name] = parameter
    scale = (d_model / 768) ** -0.5
    router_lr = config.matrix_lr if config.router_lr is None else config.router_lr
    peaks = {"matrix": config.matrix_lr, "embed": config.embed_lr, "head": config.head_lr, "router": router_lr}
    groups = {}
    for name, lr in peaks.items():
        if name not in parameters:
            continue
        members = parameters[name]
        if _optimizer_of(name, config) == "muon":
            dtype = NS_DTYPES[config.ns_dtype] or fast_dtype(next(iter(members.values())).device)
            muon = Muon(members, ns_steps=config.ns_steps, ns_dtype=dtype)
            groups[name] = Group(muon, lr * scale if config.scale_muon else lr)
        else:
            groups[name] = Group(AdamW(members, betas=config.betas, eps=config.eps), lr * scale)
    return Optimizers(groups, config)


def moves_matrices(name: str, parameter: Tensor, config: OptimConfig) -> bool:
    """Whether the parameter of that name is Muon's, which moves matrices whole; AdamW moves each number by itself."""
    return _optimizer_of(_group_of(name, parameter), config) == "muon"


def _optimizer_of(group: str, config: OptimConfig) -> str:
    return {"matrix": "muon", "router": config.router_optimizer}.get(group, "adamw")


def _group_of(name: str, parameter: Tensor) -> str:
    for group in ("embed", "head", "router"):
        if group in name.split("."):
            return group
    if parameter.ndim < 2:
        raise ValueError(
            f"parameter {name} of shape {tuple(parameter.shape)} has no optimizer: Muon takes matrices, AdamW the "
            "embedding, the head and the router; leave it out of named_parameters and step it yourself"
        )
    return "matrix"

"""Defines the training state, which optimizer steps update and checkpoints store, including measurements of steps.

Metrics are means of values that are computed at each step, so they do not depend on --log-every. Values computed from
sums over several steps would, since both loads and batch cutoffs vary less when averaged over more steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..data import Loader, Position, Tokenizer, Tokens
from ..distributed import LocalBatch, OptimizerShards, Parallel, Slice, Status
from ..evaluation import Task
from ..files import corrupted_file_error
from ..model import GPT, Output
from ..optim import Optimizers
from ..routing import Observation, scores_not_finite, summed_over_ranks
from ..runs import Checkpoint, Part
from .budget import Budget
from .config import TrainConfig

COUNTERS = (
    "tokens", "seconds", "elapsed", "interval_steps", "interval_tokens", "interval_seconds", "skipped",
    "skipped_in_a_row",
)  # fmt: skip
"""The attributes of `TrainState` that checkpoints store unchanged."""


class Sums(NamedTuple):
    """Sums over the micro-batches and ranks of a step, detached and on the model's device.

    Each loss has been divided by the number of micro-batches on all ranks, so that the sum is the mean over the step.
    """

    loss: Tensor  # (), including the rules' auxiliary losses
    cross_entropy: Tensor  # ()
    observations: tuple[Observation, ...]

    def __add__(self, other: Sums) -> Sums:  # type: ignore[override]
        observations = tuple(a + b for a, b in zip(self.observations, other.observations, strict=True))
        return Sums(self.loss + other.loss, self.cross_entropy + other.cross_entropy, observations)


Values = dict[str, Tensor]
"""The values of a step, or their sums over steps, keyed by `name` or `layer.name`."""

MEASURED = ("usage", "load_spread", "fanout_mean", "fanout_std", "score_std", "gate_std")
"""The properties of an observation that are recorded as metrics for every rule."""


def step_values(model: GPT, observations: tuple[Observation, ...]) -> Values:
    """Return the values of a step. Call this before updating the rules, whose current state routed the step."""
    found: Values = {}
    for (layer, moe), seen in zip(model.moe_layers(), observations, strict=True):
        values = {name: getattr(seen, name) for name in MEASURED}
        rule, state = moe.router.rule, moe.router.state
        of_rule = rule.describe(state) | rule.measure(state, seen)
        values |= {name: value.clone() for name, value in of_rule.items()}  # the state is updated in place
        found |= {f"{layer}.{name}": value for name, value in values.items()}
    return found


class Interval(NamedTuple):
    """The steps between two lines of metrics, excluding skipped steps."""

    steps: int
    means: Values  # over these steps, on the CPU
    tokens_per_second: float


def all_reduce(
    sums: Sums, norm: Tensor, status: Status, group: dist.ProcessGroup | None
) -> tuple[Sums, Tensor, Status]:
    """Return the sums, the gradient norm and the status over all ranks, using a single all-reduce of a few numbers."""
    if group is None:
        return sums, norm, status
    tensors, structure = tree_flatten((sums, norm.double().square(), torch.tensor(status, device=norm.device)))
    sums, square, counts = tree_unflatten(summed_over_ranks(tensors, group), structure)
    return sums, square.sqrt().to(norm.dtype), Status(*counts.tolist())


def describe_nonfinite(model: GPT, sums: Sums) -> str:
    """Return a clause that says what is not finite: the loss, the scores of the first such layer, or a gradient."""
    layers = zip(model.moe_layers(), sums.observations, strict=True)
    clauses = (scores_not_finite(observation, f"layer {layer}") for (layer, _), observation in layers)
    scores = next(filter(None, clauses), None)
    if sums.loss.isfinite():
        return scores or "a gradient is not finite"
    return "the loss is not finite" + ("" if scores is None else f" and {scores}")


class TrainState:
    """A model in training, with its optimizers, its data and its counters.

    step: number of steps so far, including skipped ones. seconds: time spent on these steps. elapsed: time spent on the
    run, including the work between steps. local: this rank's part of a step, by default the whole step. shards: the
    parameters that this rank's optimizers step, by default all. forward: the model's compiled forward, if any.
    """

    def __init__(
        self,
        model: GPT,
        optimizers: Optimizers,
        loader: Loader,
        config: TrainConfig,
        *,
        parallel: Parallel = Parallel(),  # noqa: B008  a frozen record
        local: LocalBatch | None = None,
        shards: OptimizerShards | None = None,
        forward: Callable[..., Output] | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.model = model
        self.forward: Callable[..., Output] = model if forward is None else forward
        self.optimizers = optimizers
        self.loader = loader
        self.config = config
        self.parallel = parallel
        self.local = local or LocalBatch(config.batch_size, config.accumulation)
        self.shards = shards or OptimizerShards(dict(model.named_parameters()))
        self.device = model.embed.weight.device
        self.budget = budget or Budget(config.steps)
        self.step = self.tokens = self.skipped = self.skipped_in_a_row = 0
        self.seconds = self.elapsed = 0.0
        self.options: dict[str, Any] = {}  # the options that decide what the run learns; saved in checkpoints
        self.not_finite = ""  # the reason why the last step was skipped; empty if it was not
        self.status = Status()  # summed over all ranks, at the last step
        # Measurements since the last `take_interval`.
        self._values: Values = {}
        self.interval_steps = self.interval_tokens = 0  # excluding skipped steps, but including their tokens
        self.interval_seconds = 0.0

    @property
    def steps(self) -> int:
        """The number of steps in the whole run, as decided so far."""
        return self.budget.steps_at(self.step)

    @property
    def is_at_end(self) -> bool:
        return self.step == self.steps

    def is_due(self, every: int | None) -> bool:
        """Return True at every multiple of `every` and at the end of the run, but never if `every` is None."""
        return every is not None and (self.step % every == 0 or self.is_at_end)

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rate of each parameter group at the last step."""
        last = self.step - 1
        return self.optimizers.learning_rates(last, self.budget.scheduled, self.budget.progress(last))

    def add_to_interval(self, values: Values) -> None:
        """Add a step's measurements to the next line of metrics."""
        before = self._values
        self._values = {name: value + before[name] for name, value in values.items()} if before else values
        self.interval_steps += 1

    def count_step(self, not_finite: str, tokens: int, seconds: float) -> None:
        """Advance the counters by one step. If the step was skipped, `not_finite` is the reason."""
        self.not_finite = not_finite
        self.step += 1
        self.skipped += bool(not_finite)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if not_finite else 0
        self.tokens += tokens
        self.interval_tokens += tokens
        self._spend(seconds)

    def _spend(self, seconds: float) -> None:
        self.seconds += seconds
        self.interval_seconds += seconds

    def take_interval(self) -> Interval | None:
        """Return the measurements of the steps since the last call, or None if all were skipped."""
        if not self.interval_steps:
            return None
        start = time.perf_counter()
        means = {name: value.cpu() / self.interval_steps for name, value in self._values.items()}
        self._spend(time.perf_counter() - start)  # the copies had to wait for the device
        interval = Interval(self.interval_steps, means, self.interval_tokens / self.interval_seconds)
        self._values, self.interval_steps, self.interval_tokens, self.interval_seconds = {}, 0, 0, 0.0
        return interval

    def checkpoint(self) -> Checkpoint:
        """Return this rank's part of the state, without copying weights and moments.

        The main rank's part also includes what all ranks have in common, and the model's buffers.
        """
        optimizer, owned = self.optimizers.state_dict(), self.shards.owned_weights()
        moments = {name: (tensor, self._moment_slice(name, tensor)) for name, tensor in optimizer.tensors.items()}
        tensors: dict[str, Mapping[str, Tensor | Part]] = {"model": _parts(owned), "optimizer": _parts(moments)}
        if self.parallel.ranks.is_main:
            buffers = {name: tensor for name, tensor in self.model.state_dict().items() if name not in owned}
            tensors["model"] = {**tensors["model"], **buffers}
            tensors |= {"interval": self._values, "random": random_state(self.device)}
        state = {
            "position": asdict(self.loader.position),
            "optimizer": optimizer.counters,
            "options": self.options,
            "decisions": [list(decision) for decision in self.budget.decisions],
            **{name: getattr(self, name) for name in COUNTERS},
        }
        return Checkpoint(self.step, tensors, state)

    def restore(self, saved: Checkpoint) -> None:
        """Restore everything except the weights from a checkpoint. Raises ValueError if it is incomplete."""
        with corrupted_file_error(f"checkpoint of step {saved.step}", "remove it to resume from an earlier one"):
            mine, whole = self.optimizers.state_dict().tensors, saved.tensors["optimizer"]
            moments = {name: self._local_part(name, tensor, mine) for name, tensor in whole.items()}
            self.optimizers.load_state_dict(moments, saved.state["optimizer"])
            self._values = {name: tensor.to(self.device) for name, tensor in saved.tensors["interval"].items()}
            restore_random_state(saved.tensors["random"], self.device)
            self.loader.seek(Position(**saved.state["position"]))
            self.step = saved.step
            for name in COUNTERS:
                setattr(self, name, saved.state[name])

    def _local_part(self, name: str, saved: Tensor, moments: Mapping[str, Tensor]) -> Tensor:
        """Return this rank's slice of a full moment. If its shape is wrong, return it whole, so that loading fails."""
        if name not in moments:
            return saved
        where = self._moment_slice(name, moments[name])
        mine = saved[where.start : where.stop]
        return mine.reshape(moments[name].shape) if tuple(saved.shape) == where.shape else saved

    def _moment_slice(self, name: str, moment: Tensor) -> Slice:
        """Return this rank's slice of a full moment, which covers the same rows as the slice of its parameter.

        name: the moment's name, such as `muon.blocks.0.….momentum`, which contains the parameter's name. Along each
        dimension, the full moment is as long as the full parameter if this rank's moment and shard of the parameter
        are equally long, and otherwise as long as this rank's moment.
        """
        of = name.split(".", 1)[1].rsplit(".", 1)[0]
        parameter, where = self.shards.parameters[of], self.shards.slices[of]
        sizes = zip(reversed(where.shape), reversed(parameter.shape), reversed(moment.shape), strict=False)
        shape = tuple(full if mine == its else its for full, mine, its in sizes)[::-1]
        return Slice(where.start, shape[0] if where.is_full else where.stop, shape)


class Prepared(NamedTuple):
    """A run that is ready for its next step."""

    state: TrainState
    tokenizer: Tokenizer
    validation: Tokens | None  # None if there is no validation
    core: Sequence[Task]  # empty if CORE is not evaluated
    record: dict[str, Any]  # the content of config.json
    extended: str | None  # a line about the new learning rates, if the run is being extended


def _parts(slices: Mapping[str, tuple[Tensor, Slice]]) -> dict[str, Tensor | Part]:
    """Return tensors as they are saved: in the shape of the full tensor, or as a `Part` with its position."""
    parts: dict[str, Tensor | Part] = {}
    for name, (tensor, where) in slices.items():
        if where.is_full:
            parts[name] = tensor.view(where.shape)
        elif where.stop > where.start:
            parts[name] = Part(tensor.view(where.stop - where.start, *where.shape[1:]), where.start, where.shape)
    return parts


def load_weights(model: GPT, saved: Checkpoint) -> None:
    """Load a checkpoint's weights into a model that is not sharded yet. Raises ValueError if they do not fit."""
    with corrupted_file_error(f"checkpoint of step {saved.step}", "remove it to resume from an earlier one"):
        try:
            model.load_state_dict(saved.tensors["model"])
        except RuntimeError as error:
            raise ValueError(f"it does not fit config.json: {' '.join(str(error).split())}") from error


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's global random generators. The loader does not need one to resume."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state()
    return states


def restore_random_state(states: dict[str, Tensor], device: torch.device) -> None:
    """Restore the states of the generators. A generator that is missing from `states` keeps its state."""
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu" and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type])

"""The state that an optimizer step reads and changes, and a checkpoint keeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..data import Loader, Position
from ..distributed import LocalBatch, OptimizerShards, Parallel, Slice, Status
from ..files import corrupted_file_error
from ..model import GPT, Output
from ..optim import Optimizers
from ..runs import Checkpoint, Part
from .budget import Budget
from .config import TrainConfig
from .sums import Interval, Sums, Values, add_steps

_STEPS = "steps."
"""Prefix, among the tensors of a checkpoint, of values measured once per step."""
COUNTERS = ("tokens", "seconds", "elapsed", "interval_tokens", "interval_seconds", "skipped", "skipped_in_a_row")
"""The attributes of `TrainState` that a checkpoint keeps as they are."""


class TrainState:
    """A model in training, with its optimizers, its data and its counters.

    step: optimizer steps so far, skipped ones included. seconds: time spent on them. elapsed: time spent on the run,
    with what is done between steps. loader: of this rank. local: this rank's batch, the whole one by default.
    shards: what this rank's optimizers step, everything by default. forward: the model, or its compiled forward.
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
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0
        self.elapsed = 0.0
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.options: dict[str, Any] = {}  # that decide what the run learns, for checkpoints
        self.not_finite = ""  # why the last step was skipped; empty if it was not
        self.status = Status()  # of all ranks, at the last step
        # Since the last `take_interval`; None if no step was made.
        self._sums: Sums | None = None
        self._values: Values = {}
        self.interval_tokens = 0
        self.interval_seconds = 0.0

    @property
    def steps(self) -> int:
        """The number of steps of the whole run, as decided so far."""
        return self.budget.steps_at(self.step)

    @property
    def is_at_end(self) -> bool:
        return self.step == self.steps

    def is_due(self, every: int | None) -> bool:
        """Return True every so many steps and at the end; never for None."""
        return every is not None and (self.step % every == 0 or self.is_at_end)

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rate of each parameter group at the last step."""
        last = self.step - 1
        return self.optimizers.learning_rates(last, self.budget.scheduled, self.budget.progress(last))

    def add_to_interval(self, sums: Sums, values: Values) -> None:
        """Add a step's measurements to the next line of metrics."""
        self._values = values if self._sums is None else add_steps(self._values, values)
        self._sums = sums if self._sums is None else self._sums + sums

    def count_step(self, not_finite: str, tokens: int, seconds: float) -> None:
        """Advance the counters by one step; `not_finite` says why it was skipped, if it was."""
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
        """Return the measurements of the steps since the last call; None if all of them were skipped."""
        if self._sums is None:
            return None
        start = time.perf_counter()
        sums = tree_map(Tensor.cpu, self._sums)
        steps = round(float(sums.micro_batches)) // self.config.accumulation
        means = {name: value.cpu() / steps for name, value in self._values.items()}
        self._spend(time.perf_counter() - start)  # the copies waited for the steps on the device
        interval = Interval(steps, sums, means, self.interval_tokens / self.interval_seconds)
        self._sums, self._values, self.interval_tokens, self.interval_seconds = None, {}, 0, 0.0
        return interval

    def checkpoint(self) -> Checkpoint:
        """Return this rank's part of the state, weights and moments not copied.

        The main rank's part has what all ranks have in common.
        """
        optimizer = self.optimizers.state_dict()
        interval = {} if self._sums is None else self._sums.tensors()
        interval |= {f"{_STEPS}{name}": value for name, value in self._values.items()}
        moments = _parts(
            {name: (tensor, self._moment_slice(name, tensor)) for name, tensor in optimizer.tensors.items()}
        )
        common: dict[str, Mapping[str, Tensor | Part]] = {
            # Some tensors share memory, as loss and cross-entropy of a single micro-batch do; safetensors refuses that.
            "interval": {name: tensor.clone() for name, tensor in interval.items()},
            "random": random_state(self.device),
        }
        return Checkpoint(
            self.step,
            {"model": self._weights(), "optimizer": moments} | (common if self.parallel.is_main else {}),
            {
                "position": asdict(self.loader.position),
                "optimizer": optimizer.counters,
                "options": self.options,
                "decisions": [list(decision) for decision in self.budget.decisions],
                **{name: getattr(self, name) for name in COUNTERS},
            },
        )

    def _weights(self) -> dict[str, Tensor | Part]:
        """Return the weights that this rank owns; the main rank adds the buffers, which no rank owns."""
        owned = self.shards.owned_weights()
        return _parts(owned) | {
            name: tensor
            for name, tensor in self.model.state_dict().items()
            if self.parallel.is_main and name not in owned
        }

    def restore(self, saved: Checkpoint) -> None:
        """Restore all but the weights from a checkpoint. Raises ValueError if it lacks something."""
        with corrupted_file_error(f"checkpoint of step {saved.step}", "remove it to go on from an earlier one"):
            self._restore(saved)

    def _restore(self, saved: Checkpoint) -> None:
        moments = self.optimizers.state_dict().tensors
        self.optimizers.load_state_dict(
            {name: self._local_part(name, tensor, moments) for name, tensor in saved.tensors["optimizer"].items()},
            saved.state["optimizer"],
        )
        named = {name: tensor.to(self.device) for name, tensor in saved.tensors["interval"].items()}
        layers = len(self.model.moe_layers())
        values = {name.removeprefix(_STEPS): tensor for name, tensor in named.items() if name.startswith(_STEPS)}
        self._sums, self._values = Sums.from_tensors(named, layers) if named else None, values
        restore_random_state(saved.tensors["random"], self.device)
        self.loader.seek(Position(**saved.state["position"]))
        self.step = saved.step
        for name in COUNTERS:
            setattr(self, name, saved.state[name])

    def _local_part(self, name: str, saved: Tensor, moments: Mapping[str, Tensor]) -> Tensor:
        """Return this rank's slice of a full moment; mismatches pass through and are rejected on load."""
        if name not in moments:
            return saved
        where = self._moment_slice(name, moments[name])
        return where.of(saved).reshape(moments[name].shape) if tuple(saved.shape) == where.shape else saved

    def _moment_slice(self, name: str, moment: Tensor) -> Slice:
        """Return the place of this rank's moment in the full one: its parameter's, where their shapes agree."""
        parameter, where = self.shards.parameters[parameter_of(name)], self.shards.slices[parameter_of(name)]
        sizes = zip(reversed(where.shape), reversed(parameter.shape), reversed(moment.shape), strict=False)
        shape = tuple(full if mine == its else its for full, mine, its in sizes)[::-1]
        return Slice(where.start, shape[0] if where.is_full else where.stop, shape)


def _parts(slices: Mapping[str, tuple[Tensor, Slice]]) -> dict[str, Tensor | Part]:
    """Return the tensors as they are saved: in the full parameter's shape, partial ones with their place in it."""
    parts: dict[str, Tensor | Part] = {}
    for name, (tensor, where) in slices.items():
        if where.is_full:
            parts[name] = tensor.view(where.shape)
        elif where.stop > where.start:
            parts[name] = Part(tensor.view(where.stop - where.start, *where.shape[1:]), where.start, where.shape)
    return parts


def load_weights(model: GPT, saved: Checkpoint) -> None:
    """Load a checkpoint's weights into a model that is not sharded yet. Raises ValueError if they do not fit."""
    with corrupted_file_error(f"checkpoint of step {saved.step}", "remove it to go on from an earlier one"):
        try:
            model.load_state_dict(saved.tensors["model"])
        except RuntimeError as error:
            raise ValueError(f"does not fit config.json: {' '.join(str(error).split())}") from error


def parameter_of(moment: str) -> str:
    """Return the name of the parameter that a moment belongs to, as in `muon.blocks.0.….momentum`."""
    return moment.split(".", 1)[1].rsplit(".", 1)[0]


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of torch's global generators, the only ones in use; the loader needs only its position."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state()
    return states


def restore_random_state(states: dict[str, Tensor], device: torch.device) -> None:
    """Restore the generators; one that the checkpoint lacks keeps its seed."""
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu" and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type])

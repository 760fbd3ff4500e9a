"""One optimizer step, and all that has to be saved to go on from it as if never stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..data import Loader, Position
from ..distributed import LocalBatch, OptimizerShards, Parallel, Slice, Status, Unsharded
from ..model import GPT, Observation, Output
from ..moe import all_finite, scores_not_finite, summed_over_ranks
from ..optim import Optimizers
from ..runs import Checkpoint, Part
from ..runs.files import damage_told
from .budget import Budget
from .config import TrainConfig
from .step_means import Values, add_steps, of_layer, step_values

SKIPS_IN_A_ROW = 10
"""So many steps that are skipped end a run."""


_STEPS = "steps."
"""Before the names of what is measured once a step, among the tensors of a checkpoint."""


class Seen(NamedTuple):
    """Sums over micro-batches, without gradient, on the model's device."""

    micro_batches: Tensor  # () float32
    loss: Tensor  # () routing losses included
    cross_entropy: Tensor  # ()
    observations: tuple[Observation, ...]

    def __add__(self, other: Seen) -> Seen:  # type: ignore[override]
        return Seen(
            self.micro_batches + other.micro_batches,
            self.loss + other.loss,
            self.cross_entropy + other.cross_entropy,
            tuple(a + b for a, b in zip(self.observations, other.observations, strict=True)),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Flat, by name: `loss`, …, `0.load`, `0.tokens`, …"""
        named = {name: tensor for name, tensor in self._asdict().items() if name != "observations"}
        for layer, observation in enumerate(self.observations):
            named |= {f"{layer}.{name}": tensor for name, tensor in observation.tensors().items()}
        return named

    @classmethod
    def from_tensors(cls, named: dict[str, Tensor], layers: int) -> Seen:
        observations = tuple(Observation.from_tensors(of_layer(named, layer)) for layer in range(layers))
        return cls(named["micro_batches"], named["loss"], named["cross_entropy"], observations)


class Interval(NamedTuple):
    """Steps between two lines of metrics, those that were made."""

    steps: int
    seen: Seen  # sums over them, on the CPU
    means: Values  # over them, on the CPU
    tokens_per_second: float


class Trainer:
    """A model in training. `step` counts the steps made, skipped ones included; `seconds` are those spent on them.

    loader: of this rank. local: this rank's batch, all by default. shards: what this rank moves, all by default.
    forward: the model's, compiled maybe; as it is by default.
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
    ) -> None:
        self.model = model
        self.forward: Callable[..., Output] = model if forward is None else forward
        self.optimizers = optimizers
        self.loader = loader
        self.config = config
        self.parallel = parallel
        self.local = local or LocalBatch(config.batch_size, config.accumulation)
        self.shards = shards or Unsharded(dict(model.named_parameters()))
        self.ballot: Callable[[], Status] = Status
        self.votes = Status()  # of all ranks, at the last step
        self.device = model.embed.weight.device
        self.budget = Budget(config.steps)
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0
        self.elapsed = 0.0  # what is done between steps included; whoever makes them keeps it
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.not_finite = ""  # what was not, of the last step; nothing where it was made
        # Since the last `take_interval`; None where no step was made.
        self._seen: Seen | None = None
        self._values: Values = {}
        self._interval_tokens = 0
        self._interval_seconds = 0.0

    def advance(self) -> bool:
        """Make one optimizer step; False if it was skipped because `not_finite` was not: loss, gradient or observation.

        A skipped step leaves weights, optimizer and rules as they were; its batch is used up.
        """
        start = time.perf_counter()
        seen = self._micro_batches()
        self.shards.reduce_gradients()
        norm = self.optimizers.grad_norm()
        if self.parallel.world is None:
            self.votes = self.ballot()
        else:
            seen, norm, self.votes = over_ranks(seen, norm, self.ballot(), self.parallel.world)
        finite = all_finite([norm, *seen.tensors().values()])
        made = bool(finite)  # waits for the device: the one time in a step, but that several ranks read their votes
        if made:
            budget = self.budget
            self.optimizers.step(self.step, budget.scheduled, norm, self.shards.gather_updated, budget.place(self.step))
            values = step_values(self.model, seen.observations)
            self.model.update_rules(seen.observations)
            self._values = values if self._seen is None else add_steps(self._values, values)
            self._seen = seen if self._seen is None else self._seen + seen
        self.not_finite = "" if made else self._not_finite(seen)
        self.shards.finish_step()
        self.step += 1
        self.skipped += not made
        self.skipped_in_a_row = 0 if made else self.skipped_in_a_row + 1
        self._spend(time.perf_counter() - start)
        return made

    def _not_finite(self, seen: Seen) -> str:
        """A clause that says what; of scores the first layer, since NaN spreads, and its experts."""
        layers = zip(self.model.moe_layers(), seen.observations, strict=True)
        told = (scores_not_finite(observation, f"layer {layer}") for (layer, _), observation in layers)
        scores = next(filter(None, told), None)
        if seen.loss.isfinite():
            return scores or "a gradient is not finite"
        return "the loss is not finite" + ("" if scores is None else f" and {scores}")

    def _spend(self, seconds: float) -> None:
        self.seconds += seconds
        self._interval_seconds += seconds

    def _micro_batches(self) -> Seen:
        """The gradients of this rank's micro-batches, added up."""
        last = self.local.accumulation - 1
        seen: Seen | None = None
        for number in range(last + 1):
            if number == last:
                self.shards.begin_last_backward()
            new = self._micro_batch()
            seen = new if seen is None else seen + new
        assert seen is not None
        return seen

    def _micro_batch(self) -> Seen:
        """Add the gradients of the next batch, its share of the step's mean loss, to those there are."""
        batch = next(self.loader)
        tokens = batch.targets.numel() * self.parallel.world_size
        self.tokens += tokens
        self._interval_tokens += tokens
        output = self.forward(batch.tokens.to(self.device), batch.targets.to(self.device))
        ranks = self.local.ranks
        loss, cross_entropy = self.local.losses(output, batch.targets, self.loader)
        (loss / (self.local.accumulation * self.parallel.world_size)).backward()
        loss = loss.detach() / ranks
        return Seen(torch.ones_like(loss) / ranks, loss, cross_entropy.detach() / ranks, output.observations)

    def take_interval(self) -> Interval | None:
        """What was seen since the last call; None where no step was made."""
        if self._seen is None:
            return None
        start = time.perf_counter()
        named = {name: tensor.cpu() for name, tensor in self._seen.tensors().items()}
        seen = Seen.from_tensors(named, len(self._seen.observations))
        steps = round(float(seen.micro_batches)) // self.config.accumulation
        means = {name: value.cpu() / steps for name, value in self._values.items()}
        self._spend(time.perf_counter() - start)  # spent on waiting for the device
        interval = Interval(steps, seen, means, self._interval_tokens / self._interval_seconds)
        self._seen, self._values, self._interval_tokens, self._interval_seconds = None, {}, 0, 0.0
        return interval

    def checkpoint(self) -> Checkpoint:
        """This rank's part of everything, which is all of it where there is no other; weights and moments not copied.

        What all ranks have alike is in the first one's part.
        """
        optimizer = self.optimizers.state_dict()
        seen = {} if self._seen is None else self._seen.tensors()
        seen |= {f"{_STEPS}{name}": value for name, value in self._values.items()}
        moments = _parts(
            {name: (tensor, self.shards.slices[parameter_of(name)]) for name, tensor in optimizer.tensors.items()}
        )
        alike: dict[str, Mapping[str, Tensor | Part]] = {
            # Of one micro-batch some share memory, as loss and cross-entropy do, which safetensors refuses.
            "interval": {name: tensor.clone() for name, tensor in seen.items()},
            "random": random_state(self.device),
        }
        return Checkpoint(
            self.step,
            {"model": self._weights(), "optimizer": moments} | (alike if self.parallel.is_main else {}),
            {
                "position": asdict(self.loader.position),
                "optimizer": optimizer.counters,
                "tokens": self.tokens,
                "seconds": self.seconds,
                "elapsed": self.elapsed,
                "interval_tokens": self._interval_tokens,
                "interval_seconds": self._interval_seconds,
                "skipped": self.skipped,
                "skipped_in_a_row": self.skipped_in_a_row,
            },
        )

    def _weights(self) -> dict[str, Tensor | Part]:
        """What this rank owns of the parameters; on the first rank what none owns, too: buffers."""
        owned = self.shards.owned_weights()
        return _parts(owned) | {
            name: tensor
            for name, tensor in self.model.state_dict().items()
            if self.parallel.is_main and name not in owned
        }

    def restore(self, saved: Checkpoint) -> None:
        """Go on from a checkpoint whose weights the model has already. Raises ValueError if it lacks something."""
        with damage_told(f"checkpoint of step {saved.step}", "remove it to go on from an earlier one"):
            self._restore(saved)

    def _restore(self, saved: Checkpoint) -> None:
        moments = self.optimizers.state_dict().tensors
        self.optimizers.load_state_dict(
            {name: self._mine(name, tensor, moments) for name, tensor in saved.tensors["optimizer"].items()},
            saved.state["optimizer"],
        )
        seen = {name: tensor.to(self.device) for name, tensor in saved.tensors["interval"].items()}
        layers = len(self.model.moe_layers())
        values = {name.removeprefix(_STEPS): tensor for name, tensor in seen.items() if name.startswith(_STEPS)}
        # What older runs have not saved of an interval begins anew: the next line of metrics, not what is learned.
        whole = bool(seen) and len({name.split(".")[0] for name in values}) == layers
        self._seen, self._values = (Seen.from_tensors(seen, layers), values) if whole else (None, {})
        restore_random_state(saved.tensors["random"], self.device)
        self.loader.position = Position(**saved.state["position"])
        self.step = saved.step
        self.tokens = saved.state["tokens"]
        self.seconds = saved.state["seconds"]
        self.elapsed = saved.state.get("elapsed", self.seconds)  # older runs did not keep it
        self._interval_tokens = saved.state["interval_tokens"]
        self._interval_seconds = saved.state["interval_seconds"]
        self.skipped = saved.state["skipped"]
        self.skipped_in_a_row = saved.state["skipped_in_a_row"]

    def _mine(self, name: str, saved: Tensor, mine: Mapping[str, Tensor]) -> Tensor:
        """Of the whole of a moment what this rank has; as it is where it does not fit, which is refused elsewhere."""
        where: Slice | None = self.shards.slices.get(parameter_of(name))
        if where is None or tuple(saved.shape) != where.shape or name not in mine:
            return saved
        return where.of(saved).reshape(mine[name].shape)


def _parts(places: Mapping[str, tuple[Tensor, Slice]]) -> dict[str, Tensor | Part]:
    """As they are saved: those that there are, rows in the shape of the whole, and where they lie."""
    parts: dict[str, Tensor | Part] = {}
    for name, (tensor, where) in places.items():
        if where.is_full:
            parts[name] = tensor.view(where.shape)
        elif where.stop > where.start:
            parts[name] = Part(tensor.view(where.stop - where.start, *where.shape[1:]), where.start, where.shape)
    return parts


def load_weights(model: GPT, saved: Checkpoint) -> None:
    """Those of a checkpoint, into a whole model. Raises ValueError where they do not fit."""
    with damage_told(f"checkpoint of step {saved.step}", "remove it to go on from an earlier one"):
        try:
            model.load_state_dict(saved.tensors["model"])
        except RuntimeError as error:
            raise ValueError(f"does not fit config.json: {' '.join(str(error).split())}") from error


def parameter_of(moment: str) -> str:
    """The parameter whose moment has that name, `muon.blocks.0.….momentum`."""
    return moment.split(".", 1)[1].rsplit(".", 1)[0]


def over_ranks(seen: Seen, norm: Tensor, ballot: Status, group: dist.ProcessGroup) -> tuple[Seen, Tensor, Status]:
    """Sums of all ranks, and the norm of all their gradients; one all-reduce of a few numbers."""
    named = seen.tensors() | {"norm": norm.double().square(), "ballot": torch.tensor(ballot, device=norm.device)}
    total = dict(zip(named, summed_over_ranks(list(named.values()), group), strict=True))
    votes = Status(*map(int, total.pop("ballot").tolist()))
    return Seen.from_tensors(total, len(seen.observations)), total["norm"].sqrt().to(norm.dtype), votes


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Of torch's global generators, the only ones in use; the loader's order follows from its position."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state()
    return states


def restore_random_state(states: dict[str, Tensor], device: torch.device) -> None:
    """As saved; where a run goes on on another kind of device, that one's generator stays as seeded."""
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu" and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type])

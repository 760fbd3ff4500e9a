"""One optimizer step, and all that has to be saved to go on from it as if never stopped."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import NamedTuple

import torch
from torch import Tensor

from ..data import Loader, Position
from ..model import GPT, Observation
from ..optim import Optimizers
from ..runs import Checkpoint
from ..runs.files import damage_told
from .config import TrainConfig

SKIPS_IN_A_ROW = 10
"""So many steps without a finite loss end a run."""


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
            named |= {f"{layer}.{name}": tensor for name, tensor in observation._asdict().items()}
        return named

    @classmethod
    def from_tensors(cls, named: dict[str, Tensor], layers: int) -> Seen:
        observations = tuple(
            Observation(*(named[f"{layer}.{name}"] for name in Observation._fields)) for layer in range(layers)
        )
        return cls(named["micro_batches"], named["loss"], named["cross_entropy"], observations)


class Interval(NamedTuple):
    """Steps between two lines of metrics."""

    seen: Seen  # on the CPU
    tokens_per_second: float


class Trainer:
    """A model in training. `step` counts the steps made, skipped ones included; `seconds` are those spent on them."""

    def __init__(self, model: GPT, optimizers: Optimizers, loader: Loader, config: TrainConfig) -> None:
        self.model = model
        self.optimizers = optimizers
        self.loader = loader
        self.config = config
        self.device = model.embed.weight.device
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0
        self.skipped = 0
        self.skipped_in_a_row = 0
        # Since the last `take_interval`; None where no step was made.
        self._seen: Seen | None = None
        self._interval_tokens = 0
        self._interval_seconds = 0.0

    def advance(self) -> bool:
        """Make one optimizer step; False if it was skipped because the loss or a gradient was not finite.

        A skipped step leaves weights, optimizer and rules as they were; its batch is used up.
        """
        start = time.perf_counter()
        seen = self._micro_batch()
        for _ in range(self.config.accumulation - 1):
            seen = seen + self._micro_batch()
        finite = seen.loss.isfinite() & self.optimizers.grad_norm().isfinite()
        made = bool(finite)  # the one wait for the device in a step
        if made:
            self.optimizers.step(self.step, self.config.steps)
            self.model.update_rules(seen.observations)
            self._seen = seen if self._seen is None else self._seen + seen
        self.optimizers.zero_grad()
        self.step += 1
        self.skipped += not made
        self.skipped_in_a_row = 0 if made else self.skipped_in_a_row + 1
        self._spend(time.perf_counter() - start)
        return made

    def _spend(self, seconds: float) -> None:
        self.seconds += seconds
        self._interval_seconds += seconds

    def _micro_batch(self) -> Seen:
        """Add the gradients of the next batch, 1/accumulation of its mean loss, to those there are."""
        batch = next(self.loader)
        self.tokens += batch.targets.numel()
        self._interval_tokens += batch.targets.numel()
        output = self.model(batch.tokens.to(self.device), batch.targets.to(self.device))
        (output.loss / self.config.accumulation).backward()
        loss = output.loss.detach()
        return Seen(torch.ones_like(loss), loss, output.cross_entropy.detach(), output.observations)

    def take_interval(self) -> Interval | None:
        """What was seen since the last call; None where no step was made."""
        if self._seen is None:
            return None
        start = time.perf_counter()
        named = {name: tensor.cpu() for name, tensor in self._seen.tensors().items()}
        self._spend(time.perf_counter() - start)  # spent on waiting for the device
        interval = Interval(
            Seen.from_tensors(named, len(self._seen.observations)), self._interval_tokens / self._interval_seconds
        )
        self._seen, self._interval_tokens, self._interval_seconds = None, 0, 0.0
        return interval

    def checkpoint(self) -> Checkpoint:
        """Everything; weights and moments are not copied."""
        optimizer = self.optimizers.state_dict()
        seen = {} if self._seen is None else self._seen.tensors()
        return Checkpoint(
            self.step,
            {
                "model": self.model.state_dict(),
                "optimizer": optimizer.tensors,
                # Of one micro-batch some share memory, as loss and cross-entropy do, which safetensors refuses.
                "interval": {name: tensor.clone() for name, tensor in seen.items()},
                "random": random_state(self.device),
            },
            {
                "position": asdict(self.loader.position),
                "optimizer": optimizer.counters,
                "tokens": self.tokens,
                "seconds": self.seconds,
                "interval_tokens": self._interval_tokens,
                "interval_seconds": self._interval_seconds,
                "skipped": self.skipped,
                "skipped_in_a_row": self.skipped_in_a_row,
            },
        )

    def restore(self, saved: Checkpoint) -> None:
        """Go on from a checkpoint. Raises ValueError if it is of another model, or lacks something."""
        with damage_told(f"checkpoint of step {saved.step}", "remove it to go on from an earlier one"):
            self._restore(saved)

    def _restore(self, saved: Checkpoint) -> None:
        try:
            self.model.load_state_dict(saved.tensors["model"])
        except RuntimeError as error:
            raise ValueError(f"does not fit config.json: {' '.join(str(error).split())}") from error
        self.optimizers.load_state_dict(saved.tensors["optimizer"], saved.state["optimizer"])
        seen = {name: tensor.to(self.device) for name, tensor in saved.tensors["interval"].items()}
        layers = len(self.model.moe_layers())
        # Observations older than sketches begin anew: of the next line of metrics, not of what is learned.
        whole = bool(seen) and all(f"{layer}.sketch_sum" in seen for layer in range(layers))
        self._seen = Seen.from_tensors(seen, layers) if whole else None
        restore_random_state(saved.tensors["random"], self.device)
        self.loader.position = Position(**saved.state["position"])
        self.step = saved.step
        self.tokens = saved.state["tokens"]
        self.seconds = saved.state["seconds"]
        self._interval_tokens = saved.state["interval_tokens"]
        self._interval_seconds = saved.state["interval_seconds"]
        self.skipped = saved.state["skipped"]
        self.skipped_in_a_row = saved.state["skipped_in_a_row"]


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

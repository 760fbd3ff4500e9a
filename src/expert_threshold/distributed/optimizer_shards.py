"""The shards of a model that one rank's optimizers step, and the communication around such a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

from torch import Tensor


class Slice(NamedTuple):
    """A rank's part of a full tensor: indices `start` to `stop` of its first dimension."""

    start: int
    stop: int
    shape: tuple[int, ...]  # of the full tensor

    @property
    def is_full(self) -> bool:
        return self.stop - self.start == self.shape[0]

    def of(self, full: Tensor) -> Tensor:
        """Returns this part of the full tensor, a view."""
        return full[self.start : self.stop]


def full_slice(tensor: Tensor) -> Slice:
    """Returns the slice that is all of the tensor."""
    return Slice(0, len(tensor), tuple(tensor.shape))


class OptimizerShards(Protocol):
    """The shards that this rank's optimizers step.

    parameters: by name, each of shape (rows, …) with possibly no rows. slices: where these lie in the full parameters.
    The methods are called in their order here, once per optimizer step.
    """

    parameters: dict[str, Tensor]
    slices: dict[str, Slice]

    def owned_weights(self) -> dict[str, tuple[Tensor, Slice]]:
        """Returns the weights that this rank saves; exactly one rank owns each row of each parameter."""

    def begin_last_backward(self) -> None:
        """Announce that the next backward is the last of the step, so that complete gradients may be reduced."""

    def reduce_gradients(self) -> None:
        """Give each of `parameters` its gradient, summed over all ranks."""

    def gather_updated(self, names: Collection[str]) -> None:
        """Start to send the named parameters, which were just stepped, to all ranks that hold them."""

    def finish_step(self) -> None:
        """Wait until the parameters are updated everywhere, and clear their gradients."""


class Unsharded:
    """A single process: its optimizers step every parameter, and nothing is communicated."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = dict(parameters)
        self.slices = {name: full_slice(parameter) for name, parameter in parameters.items()}

    def owned_weights(self) -> dict[str, tuple[Tensor, Slice]]:
        return with_slices(self)

    def begin_last_backward(self) -> None:
        pass

    def reduce_gradients(self) -> None:
        pass

    def gather_updated(self, names: Collection[str]) -> None:
        pass

    def finish_step(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None


def with_slices(shards: OptimizerShards) -> dict[str, tuple[Tensor, Slice]]:
    """Returns every tensor of `parameters` with its slice."""
    return {name: (tensor, shards.slices[name]) for name, tensor in shards.parameters.items()}

"""Defines which shards of a model a rank's optimizers step, and what is communicated before and after a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn


class Slice(NamedTuple):
    """A rank's part of a full tensor: indices `start` to `stop` along the first dimension."""

    start: int
    stop: int
    shape: tuple[int, ...]  # shape of the full tensor

    @property
    def is_full(self) -> bool:
        return self.stop - self.start == self.shape[0]


class LocalParameter(NamedTuple):
    """The part of a parameter that this rank holds. by_row: the optimizer updates each row independently."""

    name: str
    parameter: nn.Parameter
    by_row: bool
    slice: Slice  # this rank's part of the full parameter
    group: dist.ProcessGroup  # the ranks that share the parameter, as replicas or in parts


class OptimizerShards:
    """The shards that this rank's optimizers step. The base class is for a single process, which steps all parameters.

    parameters: the shards, keyed by name, each of shape (rows, …) with zero or more rows. slices: their positions in
    the full parameters. In every optimizer step, the methods after `owned_weights` are called in the order in which
    they are defined; `gather_updated` may be called several times.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = dict(parameters)
        self.slices = {name: Slice(0, len(each), tuple(each.shape)) for name, each in parameters.items()}

    def owned_weights(self) -> dict[str, tuple[Tensor, Slice]]:
        """Return the weights that this rank saves. Each row of each parameter is owned by exactly one rank."""
        return {name: (tensor, self.slices[name]) for name, tensor in self.parameters.items()}

    def begin_last_backward(self) -> None:
        """Announce the last backward pass of the step, during which gradients may be reduced once they are complete."""

    def reduce_gradients(self) -> None:
        """Set the gradient of each shard in `parameters`, summed over all ranks."""

    def gather_updated(self, names: Collection[str]) -> None:
        """Start sending the named parameters, which have just been updated, to all ranks that hold them."""

    def finish_step(self) -> None:
        """Wait until the parameters are updated on all ranks, and clear their gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

"""Division of an optimizer step's sequences among ranks, such that the number of ranks does not change the result."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..data import Loader
from ..model import Output, Rule


class LocalBatch(NamedTuple):
    """One rank's part of an optimizer step: `accumulation` micro-batches of `batch_size` sequences.

    ranks: how many ranks share each micro-batch. joint_mean: its loss is one mean over the targets of all these ranks;
    otherwise each rank's part counts as a micro-batch of its own.
    """

    batch_size: int
    accumulation: int
    ranks: int = 1
    joint_mean: bool = False

    @property
    def pooled(self) -> int:
        """Sequences of a micro-batch that a rule sees together: those of all its ranks, or of this rank alone."""
        return self.batch_size * self.ranks if self.joint_mean else self.batch_size

    def losses(self, output: Output, targets: Tensor, loader: Loader) -> tuple[Tensor, Tensor]:
        """Return the loss and the cross-entropy, (), whose means over `ranks` are those of the shared micro-batch.

        targets: this rank's, (batch, time), negative where ignored. loader: counts those of all ranks.
        """
        loss, cross_entropy = output.loss, output.cross_entropy
        assert loss is not None
        assert cross_entropy is not None
        if self.joint_mean:
            weight = int((targets >= 0).sum()) * self.ranks / max(loader.targets, 1)
            if weight != 1:
                loss, cross_entropy = loss + (weight - 1) * cross_entropy, weight * cross_entropy
        return loss, cross_entropy


def competes_on_rank(rule: Rule | None) -> bool:
    """Return True for a rule whose tokens compete within the part of a micro-batch that is on one rank."""
    return rule is not None and "batch" in (rule.scope(training=True), rule.pool_scope())


def local_batch(batch_size: int, accumulation: int, rule: Rule | None, ranks: int) -> LocalBatch:
    """Return each rank's part of `accumulation` micro-batches of `batch_size` sequences.

    Ranks share the sequences of each micro-batch. A rule whose tokens compete within one rank would then see smaller
    pools, so with such a rule each rank gets whole micro-batches if their number divides by the ranks.
    Raises ValueError if the sequences do not divide by the ranks either.
    """
    alone = competes_on_rank(rule)
    if ranks == 1 or (alone and accumulation % ranks == 0):
        return LocalBatch(batch_size, accumulation // ranks)
    if ranks > batch_size:
        raise ValueError(
            f"{ranks} ranks are more than the {batch_size} sequences of a micro-batch; launch fewer, or give a larger "
            "--batch-size"
        )
    if batch_size % ranks:
        raise ValueError(
            f"batch_size={batch_size} is not divisible by {ranks} ranks; give a multiple of {ranks}, or launch a "
            "number of ranks that divides it"
        )
    return LocalBatch(batch_size // ranks, accumulation, ranks, joint_mean=not alone)

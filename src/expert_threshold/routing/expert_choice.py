"""Expert choice: every expert takes its k highest-scoring tokens of a pool (paper, Eq. 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..option import Decay, NonNegativeInt, option
from .cutoffs import ByCutoff, CutoffState, Pool, Pools
from .gates import NULL_SCORES, PlainGate
from .rule import Rule
from .selection import Cut, kth_largest


@dataclass(frozen=True)
class ExpertChoice(ByCutoff):
    """Loads are exact in training, where an expert sees the whole pool. At inference, running cutoffs decide."""

    pool: Pool = option(
        "batch",
        "Tokens that compete for an expert: a sequence, a micro-batch, all ranks' micro-batches or a number of tokens.",
    )
    decay: Decay = option(0.999, "Decay β of the running mean. Presets scale it to the number of steps.")
    debias: bool = option(True, "Correct the running mean for its initial value of 0.")
    gate: PlainGate = option(
        "sigmoid", "Function that turns scores into gates. The paper uses sigmoid. softmax includes the null scores."
    )
    null_scores: NonNegativeInt = option(0, NULL_SCORES)

    def cut(self, pools: Pools, ks: tuple[int, int, int], state: CutoffState) -> tuple[Cut, Cut]:
        """Return the cuts for z = 1{t ∈ Top_k(r_i)} in each pool."""
        (kth,) = kth_largest(pools.scores, ks[:1], pools.group)
        return kth, kth

    @property
    def slack(self) -> float:
        return 0

    @property
    def label(self) -> str:
        return self.label_of(None)

    def label_of(self, pool: int | None) -> str:
        return f"EC {pool_label(self.pool if pool is None else pool)}{self.label_of_gates()}"

    def calibration_rule(self, experts_per_token: float) -> Rule:
        return replace(self, experts_per_token=experts_per_token, pool="batch")

    @classmethod
    def cases(cls) -> Mapping[str, Rule]:
        return {
            "sequence": cls(6, 1, pool="sequence"),
            "batch": cls(6, 1),
            "global": cls(6, 2, pool="global"),
            "24 tokens": cls(6, 1, pool=24),
            "fractional": cls(6, 1.3, pool="sequence"),
            "every token": cls(6, 6),
            "softmax gates": cls(6, 1, gate="softmax"),
            "null scores": cls(6, 1, gate="softmax", null_scores=3),
            "not debiased": cls(6, 1, decay=0.9, debias=False),
        }


def pool_label(pool: Pool) -> str:
    """Return the pool in the paper's notation, which writes 2048 tokens as 2k."""
    if not isinstance(pool, int):
        return pool
    return f"{pool // 1024}k" if pool % 1024 == 0 else f"{pool:,}"

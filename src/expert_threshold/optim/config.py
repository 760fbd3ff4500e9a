"""Defines the options of optimizers and schedules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from ..option import Bounds, Count, Decay, NonNegativeInt, Share, option, require_valid
from .muon import Lines, OrthogonalizerName, Parts, Side

OptimizerName = Literal["muon", "adamw"]
DtypeName = Literal["auto", "bfloat16", "float32"]
LARGEST = 1e30  # keeps learning rates and the like within float32 even after they are scaled
Rate = Annotated[float, Bounds(above=0, below=LARGEST)]
Strength = Annotated[float, Bounds(least=0, below=LARGEST)]
Ratio = Annotated[float, Bounds(least=0, most=1)]


@dataclass(frozen=True)
class OptimConfig:
    """Options of optimizers and schedules, with the paper's defaults. Learning rates are peak values at d_model 768.

    Warmups are given in steps and do not scale with the length of a run, so short runs need shorter warmups.
    """

    matrix_lr: Rate = option(
        0.02, "Learning rate of matrices. The embedding and the head have separate rates; routers and experts can too."
    )
    expert_lr: Rate | None = option(None, "Learning rate of the routed experts' matrices. Defaults to matrix_lr.")
    embed_lr: Rate = option(0.2, "Learning rate of the embedding.")
    head_lr: Rate = option(0.004, "Learning rate of the head.")
    router_lr: Rate | None = option(None, "Learning rate of the routers. Defaults to matrix_lr.")
    skip_lr: Rate = option(0.5, "Learning rate of the skip scalars. It does not depend on the width.")
    router_optimizer: OptimizerName = option("muon", "Optimizer of the routers.")
    betas: Literal["nanochat"] | tuple[Decay, Decay] = option(
        (0.9, 0.95), "AdamW's decay of the first and second moment. nanochat uses different values for each group."
    )
    eps: Rate = option(1e-10, "AdamW's epsilon.")
    adamw_warmup_steps: NonNegativeInt = option(250, "Number of steps over which AdamW's learning rates rise from 0.")
    muon_warmup_steps: NonNegativeInt = option(0, "Number of steps over which Muon's learning rates rise from 0.")
    momentum: Decay = option(0.95, "Muon's momentum.")
    momentum_warmup_steps: NonNegativeInt = option(300, "Number of steps over which Muon's momentum rises from 0.85.")
    momentum_end: Decay | None = option(
        None,
        "Final value of Muon's momentum, approached as the learning rates decay. By default, the momentum does not "
        "change after its warmup.",
    )
    orthogonalizer: OrthogonalizerName = option(
        "newton_schulz", "Muon's iteration: the paper's quintic, or Polar Express, whose polynomial varies by step."
    )
    ns_steps: Count = option(5, "Number of iterations in each Muon step.")
    ns_dtype: DtypeName = option(
        "auto", "Dtype of the iteration's matrix multiplications. auto picks bfloat16 if the hardware supports it."
    )
    equilibrate: Lines | None = option(
        None, "Give the rows or columns of the momentum equal norms before the iteration (MuonEq). none disables this."
    )
    renormalize: Parts | None = option(
        None, "Give the update or its rows or columns the norm of an orthogonal matrix (Muon+). none disables this."
    )
    normuon: Side | None = option(
        None, "Divide the update by second moments of its rows, columns or longer side (NorMuon). none disables this."
    )
    expert_period: Count = option(
        1,
        "Update each layer's expert matrices only every N-th step, at N times the learning rate. Layers take turns. "
        "Momenta are updated at every step.",
    )
    weight_decay: Strength = option(
        0.0,
        "Decoupled weight decay of Muon's matrices, multiplied by the learning rate. It only acts where the update "
        "also moves a weight towards 0, and falls to 0 along half a cosine. AdamW then decays too, as in nanochat.",
    )
    cooldown: Share = option(
        1.0, "Fraction of the steps, at the end, over which learning rates fall linearly from their peak."
    )
    min_lr_ratio: Ratio = option(0.1, "Final learning rate as a fraction of the peak.")
    clip: Rate | None = option(
        None, "Maximum global norm of the gradients, to which larger gradients are scaled. none disables clipping."
    )
    scale_muon: bool = option(True, "Scale Muon's learning rates, like AdamW's, by λ = (d_model / 768)^(−1/2).")

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid value."""
        if isinstance(vars(self)["betas"], list):  # JSON has no tuples
            object.__setattr__(self, "betas", tuple(self.betas))
        require_valid(OptimConfig, vars(self))


# The optimizer in the authors' release, which differs from the paper's tables. Routers share the settings of the head.
RELEASE = OptimConfig(
    router_lr=0.004, router_optimizer="adamw", betas=(0.8, 0.95), adamw_warmup_steps=0, cooldown=0.2, min_lr_ratio=0.0,
    clip=1.0, scale_muon=False,
)  # fmt: skip

# nanochat's optimizer at 92d63d4 (July 2026), before it scales rates by batch size and weight decay by tokens.
NANOCHAT = OptimConfig(
    matrix_lr=0.02, embed_lr=0.3, head_lr=0.008, betas="nanochat", adamw_warmup_steps=40, muon_warmup_steps=40,
    momentum=0.97, momentum_warmup_steps=400, momentum_end=0.9, orthogonalizer="polar_express", equilibrate="rows",
    renormalize="matrix", normuon="longer", weight_decay=0.28, cooldown=0.65, min_lr_ratio=0.05, scale_muon=False,
)  # fmt: skip

# With nanochat's rate of 0.5, skip scalars jump to 3 in the first steps with small batches. A fifth iteration costs
# 2.5 % of an expert-threshold step at quickstart's size, and gained 0.003 ± 0.010 nats (docs/model.md). Updating each
# layer's experts only every third step saves 11 % and costs 0.002 ± 0.004 nats (docs/optimizer.md).
TUNED = replace(NANOCHAT, skip_lr=0.15, ns_steps=4, expert_period=3)

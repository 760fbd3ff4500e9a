"""The options of the training loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from ..option import Bounds, Count, option, require_valid

DeviceName = Literal["auto", "cpu", "cuda", "mps"]
DtypeName = Literal["auto", "float32", "bfloat16"]
CompileName = Literal["auto", "on", "off"]
TrackerName = Literal["none", "tensorboard", "trackio", "wandb"]


@dataclass(frozen=True)
class TrainConfig:
    """Options of the training loop. Sequences are as long as the model's context; intervals are in optimizer steps."""

    steps: Count = option(1000, "Optimizer steps.")
    batch_size: Count = option(8, "Sequences in a micro-batch.")
    accumulation: Count = option(1, "Micro-batches in an optimizer step.")
    seed: Annotated[int, Bounds(least=0, below=2**63)] = option(0, "Seed of weights and data order.")
    device: DeviceName = option("auto", "Device to train on. auto picks cuda if available, else cpu.")
    dtype: DtypeName = option(
        "auto", "Dtype of matrix products. auto picks bfloat16 if the hardware supports it, else float32."
    )
    activation_checkpointing: bool = option(False, "Recompute activations in the backward pass to save memory.")
    compile: CompileName = option(
        "auto", "Use torch.compile. auto does so, if it works, from 2·10¹⁴ FLOPs (GPU: 10¹⁶) in one process."
    )
    log_every: Count = option(10, "Steps per line of metrics. Each line holds means over its steps.")
    eval_every: Count | None = option(
        250, "Steps between validations. The last step is also validated; none switches validation off."
    )
    eval_tokens: Count | None = option(None, "Tokens per validation. Defaults to the whole validation split.")
    core_every: Count | None = option(
        None, "Steps between CORE evaluations. The last step is also evaluated; none switches CORE off."
    )
    core_max_per_task: Count | None = option(None, "Maximum number of questions per CORE task. Defaults to all.")
    sample_every: Count | None = option(
        None, "Steps between text samples. A sample is also written at the last step; none switches samples off."
    )
    checkpoint_every: Count | None = option(250, "Steps between checkpoints. Omit to save only at the end.")
    keep_checkpoints: Count | None = option(None, "Number of newest checkpoints to keep. Defaults to all.")
    track: TrackerName = option("none", "Tracker that also receives what is written to metrics.jsonl.")
    threads: Count | None = option(None, "CPU threads. Defaults to torch's choice.")
    expert_parallel: Count = option(
        1, "Number of ranks over which a layer's experts are split. 1 keeps all experts on every rank."
    )
    shard: bool = option(False, "Split parameters, gradients and optimizer state over all ranks to save memory.")
    timeout: Count = option(600, "Seconds without an answer after which a rank counts as lost.")

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid value."""
        require_valid(TrainConfig, vars(self))

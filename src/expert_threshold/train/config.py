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
    """The training loop. The length of a sequence is the model's context. Intervals count optimizer steps."""

    steps: Count = option(1000, "Optimizer steps.")
    batch_size: Count = option(8, "Sequences in a micro-batch.")
    accumulation: Count = option(1, "Micro-batches in an optimizer step.")
    seed: Annotated[int, Bounds(least=0, below=2**63)] = option(0, "Seed of the weights and of the data order.")
    device: DeviceName = option("auto", "Device to train on. auto is cuda if available, else cpu.")
    dtype: DtypeName = option(
        "auto", "Dtype of matrix products. auto is bfloat16 where the hardware has it, else float32."
    )
    activation_checkpointing: bool = option(False, "Recompute activations in the backward pass to save memory.")
    compile: CompileName = option(
        "auto", "Use torch.compile. auto does from 2·10¹⁴ FLOPs on (GPU: 10¹⁶), in one process, if it works."
    )
    log_every: Count = option(10, "Steps between lines of training metrics. A line holds means over these steps.")
    eval_every: Count | None = option(
        250, "Steps between validations. The last step is validated too; none switches validation off."
    )
    eval_tokens: Count | None = option(None, "Tokens of a validation. Defaults to the whole validation split.")
    core_every: Count | None = option(
        None, "Steps between evaluations of CORE. The last step is evaluated too; none switches CORE off."
    )
    core_max_per_task: Count | None = option(None, "Maximum number of questions of each task of CORE. Defaults to all.")
    sample_every: Count | None = option(
        None, "Steps between samples of text. The last step is sampled too; none switches samples off."
    )
    checkpoint_every: Count | None = option(250, "Steps between checkpoints. Omit to save only at the end.")
    keep_checkpoints: Count | None = option(None, "Number of newest checkpoints to keep. Defaults to all.")
    track: TrackerName = option("none", "Tracker that receives metrics in addition to metrics.jsonl.")
    threads: Count | None = option(None, "CPU threads. Defaults to torch's choice.")
    expert_parallel: Count = option(
        1, "Ranks over which the experts of a layer are split. 1 keeps all of them on every rank."
    )
    shard: bool = option(False, "Split parameters, gradients and optimizer state over all ranks, to save memory.")
    timeout: Count = option(600, "Seconds without an answer after which a rank counts as lost.")

    def __post_init__(self) -> None:
        """Raise ValueError for a value that cannot train."""
        require_valid(TrainConfig, vars(self))

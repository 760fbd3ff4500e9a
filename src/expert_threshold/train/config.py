"""The options of the training loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from ..option import Bounds, Count, option, require_valid

DeviceName = Literal["auto", "cpu", "cuda", "mps"]
DtypeName = Literal["auto", "float32", "bfloat16"]
CompileName = Literal["auto", "on", "off"]
TrackerName = Literal["none", "tensorboard", "trackio"]


@dataclass(frozen=True)
class TrainConfig:
    """The training loop. The length of a sequence is the model's context. Intervals count optimizer steps."""

    steps: Count = option(1000, "Optimizer steps.")
    batch_size: Count = option(8, "Sequences in a micro-batch.")
    accumulation: Count = option(1, "Micro-batches in an optimizer step.")
    seed: Annotated[int, Bounds(least=0, below=2**63)] = option(
        0, "Seed of the weights and of the order of the documents."
    )
    device: DeviceName = option("auto", "Where to compute; auto is cuda where there is one, else cpu.")
    dtype: DtypeName = option(
        "auto", "Type of the matrix products; auto is bfloat16 where the hardware multiplies it, else float32."
    )
    activation_checkpointing: bool = option(False, "Recompute activations in the backward pass to save memory.")
    compile: CompileName = option(
        "auto",
        "Compile the model with torch.compile; auto does from 2·10¹⁴ FLOPs on (GPU: 10¹⁶), in one process, "
        "if it works.",
    )
    log_every: Count = option(10, "Steps between two lines of training metrics, which are means over these steps.")
    eval_every: Count | None = option(250, "Steps between two validations, one more at the end; none is off.")
    eval_tokens: Count | None = option(None, "Tokens of the validation split to evaluate on; none is all.")
    core_bundle: str | None = option(
        None,
        "Eval bundle with CORE's tasks, evaluated on saved checkpoints; none evaluates CORE only with core_every.",
    )
    core_every: Count | None = option(
        None, "Steps between two evaluations of CORE, one more at the end; none is only at the end."
    )
    core_max_per_task: Count | None = option(None, "Maximum questions of each task of CORE; none is all.")
    sample_every: Count | None = option(None, "Steps between two samples of text, one more at the end; none is off.")
    checkpoint_every: Count | None = option(
        250, "Steps between two checkpoints, one more at the end; none is only at the end."
    )
    keep_checkpoints: Count | None = option(None, "Number of newest checkpoints to keep; none keeps all.")
    track: TrackerName = option("none", "Tracker that receives metrics in addition to metrics.jsonl.")
    threads: Count | None = option(None, "CPU threads; none is torch's default.")
    tokenizer_threads: Count | None = option(
        None, "Threads that read and tokenize text in shards ahead of training; none is one for each core but one."
    )
    expert_parallel: Count = option(
        1, "Ranks over which the experts of a layer are split; 1 leaves all of them on every rank."
    )
    shard: bool = option(False, "Split parameters, gradients and optimizer state over all ranks, to save memory.")
    timeout: Count = option(600, "Seconds without an answer after which a rank counts as lost.")

    def __post_init__(self) -> None:
        """Raise ValueError for a value that cannot train."""
        require_valid(TrainConfig, vars(self))

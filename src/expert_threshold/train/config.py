"""Defines the options of the training loop, and the configuration of a whole run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from ..data import DataConfig
from ..model import GPTConfig
from ..optim import OptimConfig
from ..option import Bounds, Count, option, require_valid

DeviceName = Literal["auto", "cpu", "cuda", "mps"]
DtypeName = Literal["auto", "float32", "bfloat16"]
CompileName = Literal["auto", "on", "off"]
TrackerName = Literal["none", "tensorboard", "trackio", "wandb"]


@dataclass(frozen=True)
class TrainConfig:
    """Options of the training loop. Sequences are as long as the model's context; intervals are in optimizer steps."""

    steps: Count = option(1000, "Number of optimizer steps.")
    batch_size: Count = option(8, "Sequences per micro-batch.")
    accumulation: Count = option(1, "Micro-batches per optimizer step.")
    seed: Annotated[int, Bounds(least=0, below=2**63)] = option(0, "Seed for weights and data order.")
    device: DeviceName = option("auto", "Device to train on. auto picks cuda if it is available, and cpu otherwise.")
    dtype: DtypeName = option(
        "auto", "Dtype of matrix multiplications. auto picks bfloat16 if the hardware supports it, else float32."
    )
    activation_checkpointing: bool = option(False, "Recompute activations in the backward pass to save memory.")
    compile: CompileName = option(
        "auto", "Use torch.compile. auto does if it works, in single-process runs of 2·10¹⁴ FLOPs or more (GPU: 10¹⁶)."
    )
    log_every: Count = option(10, "Log metrics every this many steps. Each line contains means over these steps.")
    eval_every: Count | None = option(
        250, "Validate every this many steps. The last step is always validated. Use none to disable validation."
    )
    eval_tokens: Count | None = option(None, "Number of tokens per validation. Defaults to the whole validation split.")
    core_every: Count | None = option(
        None, "Evaluate CORE every this many steps and at the end. Use none to disable CORE."
    )
    core_max_per_task: Count | None = option(None, "Maximum number of questions per CORE task. Defaults to all.")
    sample_every: Count | None = option(
        None, "Sample text every this many steps. The last step is always sampled. Use none to disable samples."
    )
    checkpoint_every: Count | None = option(250, "Save every this many steps. Use none to save only at the end.")
    keep_checkpoints: Count | None = option(None, "Number of most recent checkpoints to keep. Defaults to all.")
    track: TrackerName = option("none", "Experiment tracker to which all metrics are copied.")
    threads: Count | None = option(None, "Number of CPU threads. Defaults to torch's choice.")
    expert_parallel: Count = option(
        1, "Number of ranks over which each layer's experts are split. 1 keeps all experts on every rank."
    )
    shard: bool = option(False, "Split parameters, gradients and optimizer state over all ranks to save memory.")
    timeout: Count = option(600, "Seconds without a response after which a rank is considered lost.")

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid value."""
        require_valid(TrainConfig, vars(self))


@dataclass(frozen=True)
class RunConfig:
    """The configuration of a run. The rule is part of the model, but has its own section in config.json."""

    model: GPTConfig
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as a JSON object with one section per group of options."""
        return self.model.to_dict() | {name: asdict(vars(self)[name]) for name in ("data", "optim", "train")}

"""The options of the training loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

DeviceName = Literal["auto", "cpu", "cuda", "mps"]
DtypeName = Literal["auto", "float32", "bfloat16"]
CompileName = Literal["auto", "on", "off"]
TrackerName = Literal["none", "tensorboard", "trackio"]


@dataclass(frozen=True)
class TrainConfig:
    """The training loop. The length of a sequence is the model's context. Intervals count optimizer steps."""

    # Optimizer steps.
    steps: int = 1000
    # Sequences in a micro-batch.
    batch_size: int = 8
    # Micro-batches in an optimizer step.
    accumulation: int = 1
    # Seed of the weights and of the order of the documents.
    seed: int = 0
    # Where to compute; auto is cuda where there is one, else cpu.
    device: DeviceName = "auto"
    # Type of the matrix products; auto is bfloat16 where the hardware multiplies it, else float32.
    dtype: DtypeName = "auto"
    # Compute activations again in the backward pass, to save memory.
    activation_checkpointing: bool = False
    # Compile the model with torch.compile; auto does from 2·10¹⁴ FLOPs on (GPU: 10¹⁶), in one process, if it works.
    compile: CompileName = "auto"
    # Steps between two lines of training metrics, which are means over these steps.
    log_every: int = 10
    # Steps between two validations, one more at the end; None is off.
    eval_every: int | None = 250
    # Tokens of the validation split to evaluate on; None is all.
    eval_tokens: int | None = None
    # Eval bundle with the tasks of CORE, asked after a checkpoint was saved; None asks none without core_every.
    core_bundle: str | None = None
    # Steps between two times that CORE is asked, one more at the end; None is only at the end.
    core_every: int | None = None
    # Questions of each task of CORE at most; None is all.
    core_max_per_task: int | None = None
    # Steps between two samples of text, one more at the end; None is off.
    sample_every: int | None = None
    # Steps between two checkpoints, one more at the end; None is only at the end.
    checkpoint_every: int | None = 250
    # How many of the newest checkpoints stay; None keeps all.
    keep_checkpoints: int | None = None
    # Where metrics go beside metrics.jsonl.
    track: TrackerName = "none"
    # CPU threads; None is torch's default.
    threads: int | None = None
    # Threads that read and tokenize text in shards ahead of training; None is one for each core but one.
    tokenizer_threads: int | None = None
    # Ranks over which the experts of a layer are split; 1 leaves all of them on every rank.
    expert_parallel: int = 1
    # Split parameters, gradients and optimizer state over all ranks, to save memory.
    shard: bool = False
    # Seconds after which a rank that does not answer counts as lost.
    timeout: int = 600

    def __post_init__(self) -> None:
        """Raises ValueError for a value that cannot train."""
        for name in ("steps", "batch_size", "accumulation", "log_every", "expert_parallel", "timeout"):
            if not (type(vars(self)[name]) is int and vars(self)[name] >= 1):
                raise ValueError(f"{name}={vars(self)[name]!r} must be a whole number of at least 1")
        for name in (
            "eval_every", "eval_tokens", "sample_every", "checkpoint_every", "keep_checkpoints", "threads",
            "tokenizer_threads", "core_every", "core_max_per_task",
        ):  # fmt: skip
            if not (vars(self)[name] is None or (type(vars(self)[name]) is int and vars(self)[name] >= 1)):
                raise ValueError(f"{name}={vars(self)[name]!r} must be a whole number of at least 1, or none")
        if not (type(self.seed) is int and 0 <= self.seed < 2**63):
            raise ValueError(f"seed={self.seed!r} must be a whole number from 0 to below 2**63")
        for name, known in (
            ("device", DeviceName),
            ("dtype", DtypeName),
            ("compile", CompileName),
            ("track", TrackerName),
        ):
            if vars(self)[name] not in get_args(known):
                raise ValueError(f"{name}={vars(self)[name]!r} is unknown; use one of {', '.join(get_args(known))}")

"""Defines run folders, which contain all that a training run writes: enough to resume, repeat or use the run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data import Tokenizer
from ..files import new_folder, read_json, replace_json, replacing
from ..model import GPT, GPTConfig
from . import checkpoint
from .checkpoint import Checkpoint, Tensors
from .lock import LOCK, exclusive, is_vacant
from .metrics import Metrics

FORMAT = "expert-threshold run"
VERSION = 2


def read_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer from a file. Raises ValueError if the file is missing or damaged."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; restore it from a backup, or train again")
    return Tokenizer.load(path)


class RunFolder:
    """The files of one run.

    config.json             the complete configuration, with defaults
    metrics.jsonl           one JSON object per line
    tokenizer.json
    checkpoints/step_000100/
    samples/
    report.html
    """

    def __init__(self, path: Path) -> None:
        """Refer to a folder without accessing it. Most callers should use `create` or `open` instead."""
        self.path = path
        self.metrics = Metrics(path / "metrics.jsonl")
        self.tokenizer_path = path / "tokenizer.json"
        self.samples = path / "samples"
        self.report = path / "report.html"
        self.checkpoints_path = path / "checkpoints"
        self._config_path = path / "config.json"

    @classmethod
    def create(cls, path: str | Path) -> RunFolder:
        """Create an empty run folder. Raises ValueError if it already has content, since no run is ever overwritten."""
        path = Path(path)
        if path.exists() and not (path.is_dir() and is_vacant(path)):
            resume = f"continue it with --resume {path}, or " if (path / "config.json").is_file() else ""
            raise ValueError(f"--out {path} already exists; {resume}use another --out")
        path.mkdir(parents=True, exist_ok=True)
        return cls(path)

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open an existing run. Raises ValueError if `path` is not a run that this version can read."""
        run = cls(Path(path))
        if not run.path.is_dir():
            raise ValueError(f"{path}: no such run folder; pass the --out folder of an earlier `et train`")
        if not run._config_path.is_file():
            raise ValueError(f"{path} is not a run folder, as it has no config.json; pass the --out of `et train`")
        run._read_config()
        return run

    def lock(self) -> AbstractContextManager[None]:
        """Lock the run for training. Raises ValueError, naming the process, if the run is already locked."""
        return exclusive(self.path / LOCK)

    @property
    def config(self) -> dict[str, Any]:
        """The configuration that was passed to `write_config`."""
        return {key: value for key, value in self._read_config().items() if key not in ("format", "version")}

    def section(self, name: str) -> dict[str, Any]:
        """Return a section of the configuration. Raises ValueError if it is missing or not an object."""
        section = self.config.get(name)
        if not isinstance(section, dict):
            remedy = "restore the file from a backup, or train again"
            raise ValueError(f"{self._config_path}: section {name!r} is missing or damaged; {remedy}")
        return section

    def model_options(self) -> dict[str, Any]:
        """Return the options of the model and its rule, keyed by path."""
        return {f"{part}.{name}": value for part in ("model", "rule") for name, value in self.section(part).items()}

    @contextmanager
    def named(self) -> Iterator[None]:
        """Prefix a ValueError about the content of config.json with its path."""
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{self._config_path}: {error}") from error

    def write_config(self, config: Mapping[str, Any]) -> None:
        assert not {"format", "version"} & config.keys()
        replace_json(self._config_path, {"format": FORMAT, "version": VERSION, **config})

    def _read_config(self) -> dict[str, Any]:
        config = read_json(self._config_path)
        if config.get("format") != FORMAT:
            raise ValueError(
                f"{self._config_path} is damaged or was not written by expert-threshold; use a folder from `et train`"
            )
        if config.get("version") != VERSION:
            raise ValueError(
                f"{self._config_path} has format version {config.get('version')}, but this version reads {VERSION}; "
                "use the version of expert-threshold that wrote it"
            )
        return config

    def write_tokenizer(self, tokenizer: Tokenizer) -> None:
        with replacing(self.tokenizer_path) as temporary:
            tokenizer.save(temporary)

    def tokenizer(self) -> Tokenizer:
        """Return the run's tokenizer. Raises ValueError if it is missing, damaged or from another model."""
        tokenizer = read_tokenizer(self.tokenizer_path)
        vocab_size = self.section("model").get("vocab_size")
        if tokenizer.vocab_size != vocab_size:
            raise ValueError(
                f"{self.tokenizer_path} has {tokenizer.vocab_size} tokens, but config.json says {vocab_size}; "
                "restore it from a backup, or train again"
            )
        return tokenizer

    def checkpoints(self) -> list[int]:
        """Return the saved steps, oldest first."""
        return checkpoint.saved_steps(self.checkpoints_path)

    def latest_checkpoint(self) -> int | None:
        """Return the step of the newest checkpoint, or None if there is none yet."""
        return max(self.checkpoints(), default=None)

    @property
    def has_lost_checkpoints(self) -> bool:
        """True if no checkpoint is left, but a report is, which is only written once a checkpoint has been saved."""
        return self.report.exists() and self.latest_checkpoint() is None

    def save_checkpoint(self, step: int, tensors: Tensors, state: Mapping[str, Any], keep: int | None = None) -> None:
        """Save `tensors`, keyed by part and then by name, and `state`, a JSON object, atomically.

        Do nothing if the step is already saved. keep: number of newest checkpoints to keep; None keeps all. Raises
        OSError if the disk is full, in which case earlier checkpoints stay intact.
        """
        checkpoint.write(self.checkpoints_path, step, tensors, state, keep)

    def load_checkpoint(self, step: int | None = None, parts: Collection[str] | None = None) -> Checkpoint:
        """Verify and return the checkpoint of `step` (by default the newest), or only some `parts` of its tensors.

        Raises ValueError if a file is damaged or missing, naming it and the checkpoint to fall back on, or if a model
        option in config.json differs from the one in the checkpoint.
        """
        steps = self.checkpoints()
        if not steps:
            raise ValueError(f"{self.path} has no checkpoint yet; train it until the first is saved")
        if step is None:
            step = steps[-1]
        if step not in steps:
            raise ValueError(f"{self.path} has no checkpoint of step {step}; choose from {', '.join(map(str, steps))}")
        saved = checkpoint.read(self.checkpoints_path, step, parts)
        options = saved.state.get("options", {})
        for path, value in self.model_options().items() if options else ():
            if path not in options or value != options[path]:
                what = f"{path}={value!r} differs from the option that step {step} was trained with"
                raise ValueError(f"{self._config_path}: {what}; restore it from a backup")
        return saved


def derive(
    source: RunFolder,
    to: str | Path,
    step: int,
    weights: Mapping[str, Tensor],
    *,
    model: Mapping[str, Any],
    files: Mapping[str, Mapping[str, Any]] | None = None,
) -> RunFolder:
    """Write a run folder atomically, with new weights and the configuration and tokenizer of another run.

    model: the sections of the configuration that describe the new model. files: additional JSON objects, keyed by file
    name. The source does not change. Raises ValueError if `to` is not empty, and OSError if the disk is full.
    """
    with new_folder(to) as temporary:
        run = RunFolder(temporary)
        run.write_config({**source.config, **model, "init_from": str(source.path.resolve())})
        run.write_tokenizer(source.tokenizer())
        run.save_checkpoint(step, {"model": weights}, {"options": run.model_options()})
        for name, content in (files or {}).items():
            replace_json(temporary / name, content)
    return RunFolder.open(to)


def load_model(
    run: str | Path,
    step: int | None = None,
    device: str | torch.device = "cpu",
    compute_dtype: torch.dtype = torch.float32,
    rate: float | None = None,
) -> tuple[GPT, Tokenizer]:
    """Return the model of a run at `step` (by default the last saved step), in evaluation mode, and its tokenizer.

    Weights are in the compute dtype, except for routers, which stay in float32. To continue training, load the
    checkpoint instead. rate: the mean fanout; see `GPT.set_rate`. Raises ValueError if the folder, the checkpoint or
    the tokenizer is missing, damaged or foreign, or if the model cannot run at this rate.
    """
    folder = RunFolder.open(run)
    weights = folder.load_checkpoint(step, parts=("model",)).tensors["model"]
    with folder.named(), torch.device("meta"):
        model = GPT(GPTConfig.from_dict(folder.config), compute_dtype=compute_dtype)
    model.to_empty(device=device)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder.path}: the checkpoint does not match config.json: {reason}") from error
    routers = {moe.router.weight for _, moe in model.moe_layers()}
    for weight in model.parameters():
        if weight not in routers:
            weight.data = weight.data.to(compute_dtype)  # cast once instead of in every forward
    model.set_rate(rate)
    return model.eval(), folder.tokenizer()

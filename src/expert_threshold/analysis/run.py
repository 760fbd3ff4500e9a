"""A run folder's configuration, metrics and samples in one record."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..model import GPTConfig
from ..runs import RunFolder
from .records import Points, Record, series


class Run(NamedTuple):
    """A run folder that was read."""

    path: Path
    config: dict[str, Any]
    model: GPTConfig
    train: Sequence[Record]
    validation: Sequence[Record]
    events: Sequence[Record]
    samples: list[tuple[str, str]]  # name and text, first to last
    step: int  # the last one in metrics or checkpoints

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def rule(self) -> dict[str, Any]:
        rule: dict[str, Any] = self.config["model"]["rule"]
        return rule

    @property
    def rule_name(self) -> str:
        """The rule's name and label in words."""
        name = str(self.rule["name"]).replace("_", " ")
        return name if self.model.rule is None else f"{name} ({self.model.rule.label})"

    @property
    def warmup_steps(self) -> int:
        return 0 if self.model.rule is None else self.model.rule.warmup

    @property
    def has_cutoffs(self) -> bool:
        """True if inference compares scores with cutoffs that training moves."""
        if self.model.rule is None:
            return False
        state = self.model.rule.init()
        return self.model.rule.thresholds(state) is not None and "cutoff" in self.model.rule.describe(state)

    @property
    def target(self) -> float:
        """The usage aimed at: experts per token / number of experts."""
        assert self.model.rule is not None
        return self.model.rule.experts_per_token / self.model.rule.num_experts

    @property
    def tokens_per_step(self) -> int:
        train = self.config["train"]
        return int(train["batch_size"] * train["accumulation"] * self.model.context)

    @property
    def bits_per_byte(self) -> Points:
        """Return (tokens trained on, bits per byte) of every validation."""
        return [(step * self.tokens_per_step, bits) for step, bits in series(self.validation, "bits_per_byte")]

    @property
    def fanout_counts(self) -> dict[int, list[int]]:
        """Return layer -> tokens by fanout in the last validation."""
        last = self.validation[-1]["layers"] if self.validation else {}
        return {int(layer): values["fanout_counts"] for layer, values in last.items() if any(values["fanout_counts"])}


def read_run(folder: RunFolder) -> Run:
    """Read a run folder. Raises ValueError if a record is damaged."""
    config, records = folder.config, folder.metrics.read()
    samples = [
        (re.sub("_0*", " ", path.stem), path.read_text(encoding="utf-8", errors="replace"))
        for path in sorted(folder.samples.glob("step_*.txt"))
    ]
    train, validation, events = ([r for r in records if r["split"] == s] for s in ("train", "validation", "event"))
    step = max([record["step"] for record in records] + folder.checkpoints(), default=0)
    path, model = folder.path.resolve(), GPTConfig.from_dict(config["model"])
    return Run(path, config, model, train, validation, events, samples, step)

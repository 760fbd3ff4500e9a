"""The contents of a run folder, and series of numbers from its metrics.jsonl, in which null becomes NaN."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from ..model import GPTConfig
from ..runs import RunFolder

Record = Mapping[str, Any]
Points = Sequence[tuple[float, float]]
"""(x, y) sorted by x; a missing y is NaN."""


class Run(NamedTuple):
    """The contents of a run folder."""

    path: Path
    config: dict[str, Any]
    model: GPTConfig
    train: Sequence[Record]
    validation: Sequence[Record]
    events: Sequence[Record]
    samples: list[tuple[str, str]]  # name and text, first to last
    step: int  # the last step in metrics or checkpoints

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def rule(self) -> dict[str, Any]:
        rule: dict[str, Any] = self.config["rule"]
        return rule

    @property
    def rule_name(self) -> str:
        """The name of the rule in words, with its label."""
        name = str(self.rule["name"]).replace("_", " ")
        return name if self.model.rule is None else f"{name} ({self.model.rule.label})"

    @property
    def warmup_steps(self) -> int:
        return 0 if self.model.rule is None else self.model.rule.warmup

    @property
    def has_cutoffs(self) -> bool:
        """True if inference compares scores with cutoffs that training updates."""
        if self.model.rule is None:
            return False
        state = self.model.rule.init()
        return self.model.rule.thresholds(state) is not None and "cutoff" in self.model.rule.describe(state)

    @property
    def target(self) -> float:
        """The target usage: experts per token / number of experts."""
        assert self.model.rule is not None
        return self.model.rule.experts_per_token / self.model.rule.num_experts

    @property
    def tokens_per_step(self) -> int:
        train = self.config["train"]
        return int(train["batch_size"] * train["accumulation"] * self.model.context)

    @property
    def bits_per_byte(self) -> Points:
        """The tokens trained on and the bits per byte of every validation."""
        return [(step * self.tokens_per_step, bits) for step, bits in series(self.validation, "bits_per_byte")]

    @property
    def fanout_counts(self) -> dict[int, list[int]]:
        """The number of tokens by fanout in the last validation, by layer."""
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
    path, model = folder.path.resolve(), GPTConfig.from_dict(config)
    return Run(path, config, model, train, validation, events, samples, step)


def require_numbers(record: Record) -> None:
    """Raise an error for `corrupted_file_error` unless a loss and the measures of its layers are numbers."""
    _require_numbers("loss", record["loss"])
    for layer, measures in record["layers"].items():
        int(layer)
        for name, value in measures.items():
            _require_numbers(name, value)


def _require_numbers(name: str, value: Any) -> None:
    if isinstance(value, list):
        for each in value:
            _require_numbers(name, each)
    elif not isinstance(value, int | float | None):
        raise TypeError(f"{name} holds {value!r}, which is not a number")


def series(records: Sequence[Record], key: str) -> Points:
    """Return (step, value) of every record that has the key."""
    return [(record["step"], _number(record[key])) for record in records if key in record]


def layers(records: Sequence[Record]) -> list[int]:
    """Return the layers with experts in ascending order."""
    return sorted({int(layer) for record in records for layer in record["layers"]})


def layer_series(records: Sequence[Record], key: str) -> dict[int, Points]:
    """Return (step, value) of every record that has the key, by layer, as a mean if there is a value per expert.

    Layers without numbers are omitted.
    """
    found = {layer: series(_of_layer(records, layer), key) for layer in layers(records)}
    return {layer: points for layer, points in found.items() if finite(points)}


def expert_series(records: Sequence[Record], key: str) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return steps (records,) and values (records, experts) by layer. Layers without numbers are omitted, and so are
    records with one number for all experts.
    """
    found = {}
    for layer in layers(records):
        having = [record for record in _of_layer(records, layer) if isinstance(record.get(key), Sequence)]
        values = np.array([[_number(value) for value in record[key]] for record in having])
        if np.isfinite(values).any():
            found[layer] = np.array([record["step"] for record in having]), values
    return found


def finite(points: Points) -> list[tuple[float, float]]:
    """Return the points whose y is finite."""
    return [(x, y) for x, y in points if math.isfinite(y)]


def mean_loss(train: Sequence[Record], share: float, until: int) -> float | None:
    """Return the mean training loss of steps `share * until` to `until`; None if no line counts or one is not finite.

    Lines of the log are weighted by the steps they cover, and count only if all of these are in the range: otherwise
    the earlier, higher losses of a long line would enter, and the mean would depend on --log-every.
    """
    late = [r for r in train if math.floor(share * until) <= r["step"] - r["steps"] and r["step"] <= until]
    steps = sum(record["steps"] for record in late)
    mean = sum(_number(record["cross_entropy"]) * record["steps"] for record in late) / steps if steps else math.nan
    return mean if math.isfinite(mean) else None


def late_loss(train: Sequence[Record]) -> float | None:
    """Return the mean training loss of the last tenth of the steps, as `mean_loss` does."""
    return mean_loss(train, 0.9, train[-1]["step"]) if train else None


def _of_layer(records: Sequence[Record], layer: int) -> list[Record]:
    named = [(record["step"], record["layers"].get(str(layer))) for record in records]
    return [{"step": step, **measures} for step, measures in named if measures is not None]


def _number(value: float | Sequence[float | None] | None) -> float:
    if isinstance(value, Sequence):
        known = [number for number in value if number is not None]
        return fmean(known) if known else math.nan
    return math.nan if value is None else value

"""The contents of a run folder, and series of numbers from its metrics.jsonl, in which null becomes NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, mean, median
from typing import Any, NamedTuple

import numpy as np

from ..files import corrupted_file_error
from ..model import GPTConfig, flops_per_token
from ..recipes import method_named
from ..routing import DENSE, Rule
from ..runs import RunFolder

Record = Mapping[str, Any]
Points = Sequence[tuple[float, float]]
"""(x, y) sorted by x; a missing y is NaN."""


WARM = 0.25
"""Training loads are means over the logging intervals that start after this share of the run: most warmups are over by
then, and methods are compared in the same part of a run."""


class Result(NamedTuple):
    """The result of a run that finished or diverged. Loads and fanouts are None without routed experts.

    A diverged run has validations up to that point, but no final loss.
    """

    method: str
    seed: int
    loss: float | None  # cross-entropy of the last validation, nats per token; None if it was not finite
    bits_per_byte: float | None
    tokens_per_second: float | None  # median over the logging intervals of training; None if there is none
    load_spread: float | None  # largest load over mean load of the last validation, in the worst layer
    fanout_mean: float | None  # of the last validation, over tokens and layers
    fanout_std: float | None
    curve: list[tuple[int, float | None]]  # tokens trained on, validation loss
    clock: list[float]  # seconds of training until each validation
    flops: list[float]  # FLOPs of training until each validation, by the fanout of each step
    load_spread_trained: float | None  # of each interval's worst layer, mean over training after warmup and `WARM`
    fanout_trained: float | None  # mean over training and layers
    unrouted: float | None  # share of tokens that went to no expert in the last validation
    gap: float | None  # last validation loss minus the loss of training's last tenth


@dataclass(frozen=True)
class Run:
    """The contents of a run folder, with properties of its method. method: the name shown in tables and figures."""

    folder: RunFolder
    config: dict[str, Any]
    model: GPTConfig
    train: Sequence[Record]
    validation: Sequence[Record]
    events: Sequence[Record]
    method: str = ""

    @property
    def seed(self) -> int:
        return int(self.config["train"]["seed"])

    @property
    def steps(self) -> tuple[int, int]:
        """The step of the last checkpoint, and the planned number of steps."""
        return self.folder.latest_checkpoint() or 0, self.config["train"]["steps"]

    @property
    def tokens_per_step(self) -> int:
        train = self.config["train"]
        return int(train["batch_size"] * train["accumulation"] * self.model.context)

    @property
    def rule(self) -> Rule:
        """The routing rule. The run must have one."""
        assert self.model.rule is not None
        return self.model.rule

    @property
    def pool(self) -> int | None:
        """The pool size in training, in tokens, or None if there are no pools."""
        rule = self.model.rule
        if rule is None or rule.scope(training=True) == "token":
            return None
        batch = self.model.context * self.config["train"]["batch_size"]
        return rule.window(self.model.context, batch, self.tokens_per_step).pool

    @property
    def rule_name(self) -> str:
        """The name of the rule in words, with its label."""
        name = str(self.config["rule"]["name"]).replace("_", " ")
        return name if self.model.rule is None else f"{name} ({self.model.rule.label})"

    @property
    def label(self) -> str:
        """The name of the rule in figures."""
        return DENSE if self.model.rule is None else self.rule.label_of(self.pool)

    @property
    def kind(self) -> str:
        """The name of the method in `et compare`, which determines its colour, or else its label."""
        return method_named(self.config["rule"]) or self.label

    @property
    def tag(self) -> dict[str, str]:
        """The fields that identify the method of a run in the data of figures."""
        return {"method": self.method, "kind": self.kind}

    @property
    def layers(self) -> list[int]:
        """The layers with experts."""
        return [] if self.model.rule is None else list(range(self.model.dense_layers, self.model.layers))

    @property
    def warmup_steps(self) -> int:
        return 0 if self.model.rule is None else self.model.rule.warmup

    @property
    def has_cutoffs(self) -> bool:
        """True if inference compares scores with cutoffs that training updates."""
        if self.model.rule is None:
            return False
        state = self.rule.init()
        return self.rule.thresholds(state) is not None and "cutoff" in self.rule.describe(state)

    @property
    def target(self) -> float:
        """The target usage: experts per token / number of experts."""
        return self.rule.experts_per_token / self.rule.num_experts

    @property
    def bounds(self) -> tuple[int, int] | None:
        """The minimum and maximum load of an expert in training, for a pool in which every expert gets at least one
        token; None without bounds.
        """
        experts = self.rule.num_experts
        return self.rule.load_bounds(experts * max(experts, math.ceil(1 / self.rule.experts_per_token)))

    @property
    def has_bounds(self) -> bool:
        """True if training bounds loads that are not already exact by definition."""
        return not self.rule.looks_ahead and self.bounds is not None

    @property
    def bits_per_byte(self) -> Points:
        """The tokens trained on and the bits per byte of every validation."""
        return [(step * self.tokens_per_step, bits) for step, bits in series(self.validation, "bits_per_byte")]

    @property
    def fanout_counts(self) -> dict[int, list[int]]:
        """The number of tokens with each fanout in the last validation, keyed by layer."""
        last = self.validation[-1]["layers"] if self.validation else {}
        return {int(layer): values["fanout_counts"] for layer, values in last.items() if any(values["fanout_counts"])}

    @cached_property
    def result(self) -> Result | None:
        """The result, or None if the run neither finished nor diverged. Raises ValueError if a record is damaged."""
        with damaged(self.folder):
            return _result(self)


def damaged(folder: RunFolder) -> AbstractContextManager[None]:
    """Return a context in which an unreadable run of a comparison raises ValueError with the folder and a remedy."""
    remedy = f"restore it from a backup, or remove {folder.path} to train that run again"
    return corrupted_file_error(folder.path, remedy)


def read_run(folder: RunFolder, method: str = "") -> Run:
    """Read a run folder. Raises ValueError if a record is damaged."""
    config, records = folder.config, folder.metrics.read()
    train, validation, events = ([r for r in records if r["split"] == s] for s in ("train", "validation", "event"))
    return Run(folder, config, GPTConfig.from_dict(config), train, validation, events, method)


def require_numbers(record: Record) -> None:
    """Raise an error for `corrupted_file_error` unless the loss and the measures of all layers are numbers."""
    measures = [("loss", record["loss"])]
    for layer, own in record["layers"].items():
        int(layer)
        measures += own.items()
    for name, value in measures:
        for number in value if isinstance(value, list) else [value]:
            if not isinstance(number, int | float | None):
                raise TypeError(f"{name} is {number!r}, which is not a number")


def series(records: Sequence[Record], key: str) -> Points:
    """Return (step, value) for every record that has the key."""
    return [(record["step"], _number(record[key])) for record in records if key in record]


def layer_series(records: Sequence[Record], key: str) -> dict[int, Points]:
    """Return (step, value) for every record that has the key, keyed by layer. Values of experts are averaged.

    Layers without numbers are omitted.
    """
    found = {layer: series(own, key) for layer, own in _by_layer(records).items()}
    return {layer: points for layer, points in found.items() if finite(points)}


def expert_series(records: Sequence[Record], key: str) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return steps (records,) and values (records, experts), keyed by layer. Layers without numbers are omitted,
    and so are records with one number for all experts.
    """
    found = {}
    for layer, own in _by_layer(records).items():
        having = [record for record in own if isinstance(record.get(key), Sequence)]
        values = np.array([[_number(value) for value in record[key]] for record in having])
        if np.isfinite(values).any():
            found[layer] = np.array([record["step"] for record in having]), values
    return found


def lines_after(train: Sequence[Record], step: float) -> list[Record]:
    """Return the lines of the training log that cover only steps after `step`."""
    return [record for record in train if record["step"] - record["steps"] >= step]


def finite(points: Points) -> list[tuple[float, float]]:
    """Return the points whose y is finite."""
    return [(x, y) for x, y in points if math.isfinite(y)]


def mean_loss(train: Sequence[Record], share: float, until: int) -> float | None:
    """Return the mean training loss from step `share * until` to `until`, or None if it is unknown or not finite.

    Lines of the log are weighted by the steps they cover, and count only if all of these are in the range. Otherwise
    the earlier, higher losses of a long line would enter, and the mean would depend on --log-every.
    """
    late = [record for record in lines_after(train, math.floor(share * until)) if record["step"] <= until]
    steps = sum(record["steps"] for record in late)
    mean = sum(_number(record["cross_entropy"]) * record["steps"] for record in late) / steps if steps else math.nan
    return mean if math.isfinite(mean) else None


def late_loss(train: Sequence[Record]) -> float | None:
    """Return the mean training loss over the last tenth of the steps; see `mean_loss`."""
    return mean_loss(train, 0.9, train[-1]["step"]) if train else None


def _by_layer(records: Sequence[Record]) -> dict[int, list[Record]]:
    """Return the measures recorded for each layer with experts, keyed by layer in ascending order."""
    found: dict[int, list[Record]] = {}
    for record in records:
        for layer, measures in record["layers"].items():
            found.setdefault(int(layer), []).append({"step": record["step"], **measures})
    return dict(sorted(found.items()))


def _number(value: float | Sequence[float | None] | None) -> float:
    if isinstance(value, Sequence):
        known = [number for number in value if number is not None]
        return fmean(known) if known else math.nan
    return math.nan if value is None else value


def _result(run: Run) -> Result | None:
    last_step, steps = run.steps
    validations = {record["step"]: record for record in run.validation}
    if any(record["event"] == "diverged" for record in run.events):
        validations[steps] = {"loss": None, "bits_per_byte": None, "layers": {}}
    elif steps not in validations or (last_step != steps and not run.folder.has_lost_checkpoints):
        return None
    last = validations[steps]
    layers = last["layers"].values()
    counts = np.array([sum(counts) for counts in zip(*(layer["fanout_counts"] for layer in layers), strict=True)])
    shares = counts / counts.sum() if counts.any() else None  # of the tokens, by fanout
    fanout, fanout_mean, fanout_std = np.arange(len(counts)), None, None
    if shares is not None:
        fanout_mean = float(fanout @ shares)
        fanout_std = float((fanout - fanout_mean) ** 2 @ shares) ** 0.5
    spreads = [layer["load_spread"] for layer in layers if layer["load_spread"] is not None]  # None: no tokens
    logged, validated = [0, *(record["step"] for record in run.train)], sorted(validations)
    fanouts = [_over_training([record], "fanout_mean", mean) for record in run.train]
    flops = [float(run.tokens_per_step * flops_per_token(run.model, rate=fanout)) for fanout in fanouts]
    loss, late = _checked(last["loss"]), late_loss(run.train)
    warm = lines_after(run.train, max(WARM * steps, run.warmup_steps))
    return Result(
        run.method,
        run.seed,
        loss,
        _checked(last["bits_per_byte"]),
        median(record["tokens_per_second"] for record in run.train) if run.train else None,
        max(spreads, default=None),
        fanout_mean,
        fanout_std,
        [(step * run.tokens_per_step, _checked(validations[step]["loss"])) for step in validated],
        np.interp(validated, logged, [0.0, *(record["seconds"] for record in run.train)]).tolist(),
        np.interp(validated, logged, [0.0, *np.cumsum(np.diff(logged) * flops)]).tolist(),
        _over_training(warm, "load_spread", max),
        _over_training(run.train, "fanout_mean", mean),
        None if shares is None else float(shares[0]),
        None if loss is None or late is None else loss - late,
    )


def _over_training(records: Sequence[Record], name: str, over_layers: Callable[[list[float]], float]) -> float | None:
    """Return the mean over steps of a value that each layer logs, or None without experts."""
    values = [[layer[name] for layer in record["layers"].values()] for record in records]
    if not all(values) or not values or any(value is None for layers in values for value in layers):
        return None
    steps = [record["steps"] for record in records]
    return float(np.average([over_layers(layers) for layers in values], weights=steps))


def _checked(value: Any) -> Any:
    """Return a finite number or None unchanged. Raises OverflowError, TypeError or ValueError for anything else."""
    if value is not None and (isinstance(value, bool) or not math.isfinite(value)):
        raise ValueError(f"{value} is not a finite number")
    return value

"""The lines of metrics.jsonl. Keys that a rule has no value for are absent; lists have one number per expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..evaluation import Validation
from ..model import GPT, Observation
from .sums import Interval, Values, of_layer

Record = dict[str, Any]


def train_record(model: GPT, interval: Interval) -> Record:
    """Return the means over an interval of numbers that each step has, as listed in docs/analysis.md.

    The mean of the lines, weighted by their steps, is therefore the mean of the run, however many steps a line covers.
    """
    sums = interval.sums
    layers = {
        str(layer): layer_record(observation, of_layer(interval.means, layer))
        for (layer, _), observation in zip(model.moe_layers(), sums.observations, strict=True)
    }
    return {
        "loss": float(sums.loss / sums.micro_batches),
        "cross_entropy": float(sums.cross_entropy / sums.micro_batches),
        "grad_norm": _number(interval.means["grad_norm"]),
        "steps": interval.steps,
        "layers": layers,
    }


def layer_record(seen: Observation, means: Values) -> Record:
    """Return one layer's part of a line. seen: summed over steps of equal token counts, so that ratios are means."""
    record = {
        "usage": _numbers(seen.usage),
        "load_spread": _number(means["load_spread"]),
        "fanout_mean": _number(seen.fanout_mean),
        "fanout_std": _number(means["fanout_std"]),
    }
    rest = {name: value for name, value in means.items() if name not in record}
    return record | {name: _numbers(value) if value.ndim else _number(value) for name, value in rest.items()}


def validation_record(model: GPT, validation: Validation) -> Record:
    """Return the line of a validation."""
    layers = {
        str(layer): {
            "usage": _numbers(observation.usage),
            "load_spread": _number(observation.load_spread),
            "fanout_mean": _number(observation.fanout_mean),
            "fanout_counts": observation.fanout_counts.tolist(),
        }
        for (layer, _), observation in zip(model.moe_layers(), validation.observations, strict=True)
    }
    return {
        "loss": validation.loss,
        "bits_per_byte": validation.bits_per_byte,
        "tokens": validation.tokens,
        "layers": layers,
    }


def core_record(core: Mapping[str, Any]) -> Record:
    """Return the line of the section "core" of evaluation.json: `metric` is the tasks' mean centred accuracy."""
    names = ("rows", "accuracy", "centred", "cropped", "sequences")
    tasks = {label: {name: task[name] for name in names} for label, task in core["tasks"].items()}
    return {"metric": core["metric"], "baselines": core["baselines"], "tasks": tasks}


def _number(value: Tensor) -> float:
    """Rounds to six digits, all that float32 holds, for half the length in the file."""
    return float(f"{float(value):.6g}")


def _numbers(values: Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]

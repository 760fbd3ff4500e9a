"""The lines of metrics.jsonl. A key is absent where the rule has no such thing; a list has one number per expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..evaluation import Validation
from ..model import GPT, Observation
from .trainer import Seen

Record = dict[str, Any]


def train_record(model: GPT, seen: Seen) -> Record:
    """Means over what was seen, and the cutoffs or biases as they are now."""
    layers = {
        str(layer): layer_record(observation, moe.router.cutoff, moe.router.bias)
        for (layer, moe), observation in zip(model.moe_layers(), seen.observations, strict=True)
    }
    return {
        "loss": float(seen.loss / seen.micro_batches),
        "cross_entropy": float(seen.cross_entropy / seen.micro_batches),
        "layers": layers,
    }


def layer_record(seen: Observation, cutoff: Tensor | None, bias: Tensor | None) -> Record:
    record = {
        "usage": _numbers(seen.usage),
        "load_spread": _number(seen.load_spread),
        "fanout_mean": _number(seen.fanout_mean),
        "fanout_std": _number(seen.fanout_std),
        "score_std": _numbers(seen.score_std),
        "gate_std": _numbers(seen.gate_std),
    }
    if bias is not None:
        record["bias"] = _numbers(bias)
    if cutoff is not None:
        record |= {
            "cutoff": _numbers(cutoff),
            "batch_cutoff": _numbers(seen.batch_cutoff),
            "raw_usage": _numbers(seen.raw_usage),
            "saturation": _numbers(seen.saturation),
            "starvation": _numbers(seen.starvation),
        }
    return record


def validation_record(model: GPT, validation: Validation) -> Record:
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
    """Of the section "core" of evaluation.json: `metric` is CORE, the mean over the tasks' centred accuracies."""
    names = ("rows", "accuracy", "centred", "cropped", "sequences")
    tasks = {label: {name: task[name] for name in names} for label, task in core["tasks"].items()}
    return {"metric": core["metric"], "baselines": core["baselines"], "tasks": tasks}


def _number(value: Tensor) -> float:
    """Six digits: what float32 holds, at half the length in the file."""
    return float(f"{float(value):.6g}")


def _numbers(values: Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]

"""The table of `et compare`: results of several methods with the same budget, data order and seeds."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median, stdev
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..files import corrupted_file_error
from ..model import flops_per_token
from ..routing import DENSE
from ..runs import RunFolder
from .records import Record, late_loss, read_run
from .sentences import fixed, listed

OfMethod = TypeVar("OfMethod", bound=Any)
"""A record with a `method`."""


class Result(NamedTuple):
    """The result of a run that finished or diverged. Load and fanout are None without routed experts.

    A diverged run has its validations up to that point, and no final loss.
    """

    method: str
    seed: int
    loss: float | None  # cross-entropy of the last validation, nats per token; None if it was not finite
    bits_per_byte: float | None
    tokens_per_second: float | None  # median over the logging intervals of training, None without one
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


class Row(NamedTuple):
    """A method's mean results over `seeds` runs; the speed is a median. A standard deviation needs two runs."""

    method: str
    seeds: int
    loss: float | None
    loss_std: float | None
    bits_per_byte: float | None
    bits_per_byte_std: float | None
    tokens_per_second: float | None
    load_spread: float | None
    fanout_mean: float | None
    fanout_std: float | None
    load_spread_trained: float | None


WARM = 0.25
"""Training loads are means over the logging intervals that start after this share of the run: most warmups are over by
then, and methods are compared in the same part of a run."""
HEADERS = ("method", "seeds", "validation loss", "bits per byte", "tokens/s", "max load / mean", "fanout")
NOTES = (
    "Losses (nats per token, mean ± standard deviation over seeds) and fanouts (routed experts per token, mean ± "
    "standard deviation over tokens) are from causal validation. Max load / mean: the busiest expert's tokens divided "
    "by the mean expert's, in the worst layer of each interval of --log-every, averaged over training after the warmup "
    "and the first quarter. Tokens/s is the median over training."
)


def read_result(folder: RunFolder, method: str, seed: int) -> Result | None:
    """Return the result of a run, None if it neither finished nor diverged. Raises ValueError if the run is damaged."""
    with corrupted_file_error(folder.path, f"restore it from a copy, or remove {folder.path} to train that run again"):
        run = read_run(folder)
        steps, tokens = run.config["train"]["steps"], run.tokens_per_step
        validations = {record["step"]: record for record in run.validation}
        if any(record["event"] == "diverged" for record in run.events):
            validations[steps] = {"loss": None, "bits_per_byte": None, "layers": {}}
        elif steps not in validations or (folder.latest_checkpoint() != steps and not folder.has_lost_checkpoints):
            return None
        last = validations[steps]
        layers = last["layers"].values()
        counts = np.array([sum(counts) for counts in zip(*(layer["fanout_counts"] for layer in layers), strict=True)])
        shares = counts / counts.sum() if counts.any() else None  # of the tokens, by fanout
        fanout_mean, fanout_std = (None, None) if shares is None else moments(shares)
        spreads = [layer["load_spread"] for layer in layers if layer["load_spread"] is not None]  # None: no tokens
        logged, validated = [0, *(record["step"] for record in run.train)], sorted(validations)
        fanouts = [_over_training([record], "fanout_mean", mean) for record in run.train]
        warmup = max(WARM * steps, run.warmup_steps)
        flops = [float(tokens * flops_per_token(run.model, rate=fanout)) for fanout in fanouts]
        loss, late = _number(last["loss"]), late_loss(run.train)
        return Result(
            method,
            seed,
            loss,
            _number(last["bits_per_byte"]),
            median(record["tokens_per_second"] for record in run.train) if run.train else None,
            max(spreads, default=None),
            fanout_mean,
            fanout_std,
            [(step * tokens, _number(validations[step]["loss"])) for step in validated],
            np.interp(validated, logged, [0.0, *(record["seconds"] for record in run.train)]).tolist(),
            np.interp(validated, logged, [0.0, *np.cumsum(np.diff(logged) * flops)]).tolist(),
            _over_training([r for r in run.train if r["step"] - r["steps"] >= warmup], "load_spread", max),
            _over_training(run.train, "fanout_mean", mean),
            None if shares is None else float(shares[0]),
            None if loss is None or late is None else loss - late,
        )


def _over_training(records: Sequence[Record], name: str, over_layers: Callable[[list[float]], float]) -> float | None:
    """Return the mean over steps of a value that each layer logs; None without experts."""
    values = [[layer[name] for layer in record["layers"].values()] for record in records]
    if not all(values) or not values or any(value is None for layers in values for value in layers):
        return None
    steps = [record["steps"] for record in records]
    return float(np.average([over_layers(layers) for layers in values], weights=steps))


def _number(value: Any) -> Any:
    """Return a finite number or None unchanged. Raises OverflowError, TypeError or ValueError for anything else."""
    if value is not None and (isinstance(value, bool) or not math.isfinite(value)):
        raise ValueError(f"{value} is not a finite number")
    return value


def moments(shares: np.ndarray) -> tuple[float, float]:
    """Return the mean and the standard deviation of the fanout. shares[n]: the share of tokens with fanout n."""
    fanout = np.arange(len(shares))
    center = float(fanout @ shares)
    return center, float((fanout - center) ** 2 @ shares) ** 0.5


def by_method(runs: Sequence[OfMethod]) -> dict[str, list[OfMethod]]:
    """Return the runs of each method, in order of first occurrence."""
    return {name: [run for run in runs if run.method == name] for name in dict.fromkeys(run.method for run in runs)}


def sizes(config: Mapping[str, Any]) -> dict[str, str | None]:
    """Return, in words, the options in which runs that share a table may differ; None where one does not apply."""
    model, rule, rate = config["model"], config["rule"], config["optim"]["expert_lr"]
    dense = rule["name"] == DENSE
    return {
        "experts": None if dense else f"{rule['num_experts']} experts of {model['d_expert']}",
        "shared": None if dense else f"{model['shared_experts']} shared",
        "null_scores": f"{rule['null_scores']} null scores" if "null_scores" in rule else None,
        "expert_lr": None if dense else f"experts at {'the usual rate' if rate is None else f'rate {rate:g}'}",
        "gate_norm": None if dense else f"{model['gate_norm'] or 'no'} norm",
        "steps": f"{config['train']['steps']:,} steps",
        "start": "from scratch" if config.get("init_from") is None else "initialised",
    }


def names_with_sizes(runs: Sequence[tuple[str, Mapping[str, str | None]]]) -> tuple[list[str], str]:
    """Return each run's method with its unusual `sizes`, such as `dense (1,260 steps)`, and a clause that names the
    usual sizes, which is empty if all runs have them.

    A size is usual if most runs have it; the first one wins a tie.
    """
    counts = {name: Counter(run_sizes[name] for _, run_sizes in runs) for name in runs[0][1]}
    usual = {name: max(count, key=lambda text: (text is not None, count[text])) for name, count in counts.items()}
    names, differing = [], set[str]()
    for method, run_sizes in runs:
        named = {name: text for name, text in run_sizes.items() if text not in (None, usual[name])}
        names.append(f"{method} ({', '.join(map(str, named.values()))})" if named else method)
        differing |= named.keys()
    shared = [str(text) for name, text in usual.items() if name in differing]
    return names, f"{listed(shared)} unless another is named" if shared else ""


def summarise(results: Sequence[Result]) -> list[Row]:
    """Return a row for each method, in order of first occurrence."""
    return [
        Row(
            method,
            len(runs),
            over_runs(runs, "loss"),
            over_runs(runs, "loss", stdev),
            over_runs(runs, "bits_per_byte"),
            over_runs(runs, "bits_per_byte", stdev),
            over_runs(runs, "tokens_per_second", median),
            *(over_runs(runs, name) for name in Row._fields[-4:]),
        )
        for method, runs in by_method(results).items()
    ]


def over_runs(runs: Sequence[Result], name: str, statistic: Callable[[list[float]], float] = mean) -> float | None:
    """Return the statistic of a field of the results as `over_seeds` does."""
    return over_seeds(statistic, [getattr(run, name) for run in runs])


def curves(results: Sequence[Result]) -> dict[str, list[tuple[int, float | None]]]:
    """Return (tokens, validation loss) by method, averaged over seeds, at the steps that all seeds validated."""
    found = {}
    for method, runs in by_method(results).items():
        losses = [dict(run.curve) for run in runs]
        shared = [tokens for tokens in losses[0] if all(tokens in each for each in losses)]
        found[method] = [(tokens, over_seeds(mean, [each[tokens] for each in losses])) for tokens in shared]
    return found


def over_seeds(statistic: Callable[[list[float]], float], values: Sequence[float | None]) -> float | None:
    """Return the statistic, or None if a value is missing or there are too few values."""
    known = [value for value in values if value is not None]
    least = 2 if statistic is stdev else 1
    return statistic(known) if len(known) == len(values) >= least else None


def cells(rows: Sequence[Row], emphasise: Callable[[str], str]) -> list[list[str]]:
    """Return the table's cells below `HEADERS`; the best loss and bits per byte are passed through `emphasise`."""
    lines = []
    for row in rows:
        loss, bits = fixed(row.loss, 3), fixed(row.bits_per_byte, 3)
        loss += "" if row.loss_std is None else f" ± {row.loss_std:.3f}"
        lines.append(
            [
                row.method,
                str(row.seeds),
                emphasise(loss) if _is_lowest(row.loss, [other.loss for other in rows]) else loss,
                emphasise(bits) if _is_lowest(row.bits_per_byte, [other.bits_per_byte for other in rows]) else bits,
                "–" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
                fixed(row.load_spread_trained, 2),
                fixed(row.fanout_mean, 2) + ("" if row.fanout_std is None else f" ± {row.fanout_std:.2f}"),
            ]
        )
    return lines


def _is_lowest(value: float | None, all_values: Sequence[float | None]) -> bool:
    return value is not None and value == min(other for other in all_values if other is not None)


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, whose first column is text."""
    every = [head, ["---", *["---:"] * (len(head) - 1)], *lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in every)


def to_csv(rows: Sequence[Row]) -> str:
    """Return the rows as CSV in full precision; missing numbers are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row._fields)
    writer.writerows(rows)
    return text.getvalue()

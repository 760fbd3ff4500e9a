"""The table of `et compare`: results of several methods with the same budget, data order and seeds."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median, stdev
from typing import Any, TypeVar

from ..routing import DENSE
from .records import Result
from .sentences import fixed, listed

OfMethod = TypeVar("OfMethod", bound=Any)  # a record with a `method`

HEADERS = ("method", "seeds", "validation loss", "bits per byte", "tokens/s", "max load / mean", "fanout")
NOTES = (
    "Losses (nats per token, mean ± standard deviation over seeds) and fanouts (routed experts per token, mean ± "
    "standard deviation over tokens) are from causal validation. Max load / mean: the busiest expert's tokens divided "
    "by the mean expert's, in the worst layer of each interval of --log-every, averaged over training after the warmup "
    "and the first quarter. Tokens/s is the median over training."
)


def by_method(runs: Sequence[OfMethod]) -> dict[str, list[OfMethod]]:
    """Return the runs of each method, in order of first occurrence."""
    return {name: [run for run in runs if run.method == name] for name in dict.fromkeys(run.method for run in runs)}


def sizes(config: Mapping[str, Any]) -> dict[str, str | None]:
    """Return, in words, the options that may differ between runs of a table, or None where one does not apply."""
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
    usual sizes. The clause is empty if all runs have the usual sizes.

    The usual size is the most frequent one, or the first of several that are equally frequent.
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


def summarise(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return each method's mean results, in order of first occurrence. The speed is a median.

    Standard deviations are None for a single run.
    """
    rows = []
    for method, runs in by_method(results).items():
        row: dict[str, Any] = {"method": method, "seeds": len(runs)}
        for name in ("loss", "bits_per_byte"):
            row |= {name: over_runs(runs, name), f"{name}_std": over_runs(runs, name, stdev)}
        row["tokens_per_second"] = over_runs(runs, "tokens_per_second", median)
        for name in ("load_spread", "fanout_mean", "fanout_std", "load_spread_trained"):
            row[name] = over_runs(runs, name)
        rows.append(row)
    return rows


def over_runs(runs: Sequence[Result], name: str, statistic: Callable[[list[float]], float] = mean) -> float | None:
    """Return the statistic of one field of the results; see `over_seeds`."""
    return over_seeds(statistic, [getattr(run, name) for run in runs])


def over_seeds(statistic: Callable[[list[float]], float], values: Sequence[float | None]) -> float | None:
    """Return the statistic, or None if a value is missing or there are too few values."""
    known = [value for value in values if value is not None]
    least = 2 if statistic is stdev else 1
    return statistic(known) if len(known) == len(values) >= least else None


def cells(rows: Sequence[Mapping[str, Any]], emphasise: Callable[[str], str]) -> list[list[str]]:
    """Return the table's cells below `HEADERS`. The best loss and bits per byte are passed through `emphasise`."""

    def shown(row: Mapping[str, Any], name: str, digits: int, spread: str = "") -> str:
        value, std = row[name], row.get(spread)
        text = fixed(value, digits) + ("" if std is None else f" ± {std:.{digits}f}")
        best = name in ("loss", "bits_per_byte") and value is not None
        return emphasise(text) if best and value == min(r[name] for r in rows if r[name] is not None) else text

    columns = {"loss": 3, "bits_per_byte": 3, "tokens_per_second": 0, "load_spread_trained": 2, "fanout_mean": 2}
    spreads = {"loss": "loss_std", "fanout_mean": "fanout_std"}
    return [
        [row["method"], str(row["seeds"]), *(shown(row, name, n, spreads.get(name, "")) for name, n in columns.items())]
        for row in rows
    ]


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose first column is text."""
    every = [head, ["---", *["---:"] * (len(head) - 1)], *lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in every)


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as CSV with full precision. Missing numbers are left empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0] if rows else (), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()

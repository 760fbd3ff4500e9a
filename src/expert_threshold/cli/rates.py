"""`et evaluate --rates`: shows how the loss of trained models depends on active compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from operator import itemgetter
from typing import Any

from rich.markup import escape
from rich.table import Table

from ..analysis.figures.plot import log_ticks, panels
from ..analysis.figures.style import METHODS, NARROW, Figure
from ..analysis.plain import array, plain
from ..analysis.sentences import fixed
from ..evaluation import Point
from ..model import GPTConfig
from ..option import NonNegative, convert
from ..routing import Rule, rule_name
from ..runs import RunFolder
from .options import parse_names
from .tables import table

FILE = "rates.json"


def read_rates(text: str) -> list[float | None]:
    """Parse rates such as "0.25,0.5,1", after None for the trained cutoffs. Raises ValueError if one is invalid."""
    try:
        return [None, *(convert(NonNegative, part) for part in parse_names("--rates", text))]
    except ValueError as error:
        raise ValueError(f"--rates {text}: {error}; write numbers such as 0.25,0.5,1,2") from None


def require_cutoffs(folder: RunFolder, method: str, flag: str = "") -> None:
    """Raise ValueError unless the run's rule overrides `method` (`calibrated`, `calibration_rule` or `at_rate`).

    flag: a prefix for the error message.
    """
    with folder.named():
        model = GPTConfig.from_dict(folder.config)
    rule = model.rule
    if rule is None or getattr(type(rule), method) is getattr(Rule, method):
        raise ValueError(
            f"{flag}{folder.path} was trained with {rule_name(rule)}, which has no cutoffs; use a run whose rule "
            "has cutoffs, such as expert_choice or expert_threshold"
        )
    if model.dense_layers == model.layers:
        raise ValueError(f"{flag}{folder.path} has no experts, since all its layers are dense; use another run")


def record(folder: RunFolder, step: int, rule: Rule, points: Sequence[Point]) -> dict[str, Any]:
    """Return a run's results, which its JSON, table and figure show."""
    return {
        "run": folder.path.name,
        "step": step,
        "num_experts": rule.num_experts,
        "experts_per_token": rule.experts_per_token,
        "points": [plain(point._asdict()) for point in points],
    }


def rates_table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the table. results: records, keyed by the paths of their runs."""
    lines = []
    for path, found in results.items():
        for place, point in enumerate(found["points"]):
            line = (
                "" if place else escape(path),
                "trained" if point["rate"] is None else f"{point['rate']:g}",
                f"{point['fanout']:.3f}",
                fixed(point["loss"], 4),
                fixed(point["bits_per_byte"], 4),
                f"{point['params_active']:,}",
                f"{point['flops_per_token'] / 1e6:,.2f}",
            )
            lines.append(line)
    what = ("rate", "routed experts per token", "loss", "bits per byte", "active parameters", "MFLOPs per token")
    shown = table(["run", *what], lines)
    shown.caption = "MFLOPs count the forward pass; the trained cutoffs come first"
    return shown


def draw_dial(results: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw loss over active compute, with a line for each run."""
    key: dict[str, dict[str, Any]] = {
        name: {"color": METHODS[(place + 3) % len(METHODS)]} for place, name in enumerate(results)
    }
    figure, every = panels(
        1.6 * NARROW, ["loss (nats per token)", "filled: trained cutoffs"], 2.2, share=False, key=key
    )
    for run, stroke in zip(results.values(), key.values(), strict=True):
        for axes, name, unit in zip(every, ("fanout", "flops_per_token"), (1, 1e-6), strict=True):
            points = [(unit * point[name], point["loss"], point["rate"] is None) for point in run["points"]]
            x, y, trained = array(sorted(points, key=itemgetter(0))).T
            axes.plot(x, y, **stroke, marker="o", markerfacecolor="white")
            axes.plot(x[trained > 0], y[trained > 0], **stroke, marker="o", markersize=7, linestyle="none")
    fanouts = [point["fanout"] for run in results.values() for point in run["points"]]
    least = min(filter(None, fanouts), default=1)
    ticks = [2.0**power for power in range(-10, 11) if 0.9 * least <= 2**power <= 1.1 * max(fanouts)]
    by_fanout, by_flops = every
    by_fanout.set_xscale("symlog", base=2, linthresh=least, linscale=0.5)  # includes 0
    by_fanout.set_xticks([0, *ticks], [str(Fraction(tick)) for tick in (0, *ticks)])
    by_fanout.set_xticks([], minor=True)
    by_fanout.set_xlabel("routed experts per token", loc="right")
    by_flops.set_xscale("log")
    log_ticks(by_flops.xaxis)
    by_flops.set_xlabel("MFLOPs per token, forward", loc="right")
    return figure

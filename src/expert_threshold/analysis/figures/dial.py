"""The figure of `et evaluate --rates`: loss over active compute, one line for each run."""

from __future__ import annotations

from fractions import Fraction
from operator import itemgetter
from typing import Any

from ..plain import Data, array
from .axes import log_ticks, panels
from .style import METHODS, NARROW, Figure


def draw_dial(data: Data) -> Figure:
    """Draw loss over compute; filled dots: trained cutoffs. data: "runs", each with "name" and "points" (`Point`)."""
    runs = data["runs"]
    key: dict[str, dict[str, Any]] = {
        run["name"]: {"color": METHODS[(place + 3) % len(METHODS)]} for place, run in enumerate(runs)
    }
    figure, every = panels(1.6 * NARROW, ["loss (nats per token)", ""], 2.2, share=False, key=key)
    for run, stroke in zip(runs, key.values(), strict=True):
        for axes, name, unit in zip(every, ("fanout", "flops_per_token"), (1, 1e-6), strict=True):
            points = [(unit * point[name], point["loss"], point["rate"] is None) for point in run["points"]]
            x, y, trained = array(sorted(points, key=itemgetter(0))).T
            axes.plot(x, y, **stroke, marker="o", markerfacecolor="white")
            axes.plot(x[trained > 0], y[trained > 0], **stroke, marker="o", markersize=7, linestyle="none")
    fanouts = [point["fanout"] for run in runs for point in run["points"]]
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

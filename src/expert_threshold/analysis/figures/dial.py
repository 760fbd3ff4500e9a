"""The figure of `et evaluate --rates`: loss over active compute, one line for each run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..plain import Data, array
from .axes import panels
from .style import METHODS, NARROW

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_dial(data: Data) -> Figure:
    """Draw loss over compute. data: "runs", each with a "name" and "points" of `evaluation.Point`; filled: trained."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    runs = data["runs"]
    key: dict[str, dict[str, Any]] = {
        run["name"]: {"color": METHODS[(place + 3) % len(METHODS)]} for place, run in enumerate(runs)
    }
    titles = ["loss (nats per token)", ""]
    figure, every = panels(1.6 * NARROW, titles, 2.2, share=False, key=key)
    for run, stroke in zip(runs, key.values(), strict=True):
        points = sorted(run["points"], key=lambda point: float(point["fanout"]))
        trained = [point for point in points if point["rate"] is None]
        for axes, name, unit in zip(every, ("fanout", "flops_per_token"), (1, 1e-6), strict=True):
            x, y = (array([unit * point[name] for point in points]), array([point["loss"] for point in points]))
            axes.plot(x, y, **stroke, marker="o", markerfacecolor="white")
            for point in trained:
                axes.plot([unit * point[name]], array([point["loss"]]), **stroke, marker="o", markersize=7)
    least = min((x for run in runs for point in run["points"] if (x := point["fanout"]) > 0), default=1)
    most = max(point["fanout"] for run in runs for point in run["points"])
    every[0].set_xscale("symlog", base=2, linthresh=least, linscale=0.5)  # from 0 on
    ticks = [2.0**power for power in range(-10, 11) if 0.9 * least <= 2**power <= 1.1 * most]
    every[0].set_xticks(
        [0, *ticks], ["0", *(f"{tick:g}" if tick >= 1 else f"1/{1 / tick:g}" for tick in ticks)], minor=False
    )
    every[1].set_xscale("log")
    every[1].xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7), numticks=20))
    every[1].xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    for axes in every:
        axes.xaxis.set_minor_locator(NullLocator())
    every[0].set_xlabel("routed experts per token", loc="right")
    every[1].set_xlabel("MFLOPs per token, forward", loc="right")
    return figure

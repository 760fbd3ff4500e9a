"""The figure of the compute dial: loss over active compute, one line for each checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..plain import Data, array
from .axes import key, key_room, outer_labels, panels
from .style import METHODS, NARROW, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def dial(data: Data, width: float = 1.6 * NARROW) -> Figure:
    """data: "runs", each with a "name" and "points" as `evaluation.Point` has them; filled: the trained cutoffs."""
    runs = data["runs"]
    names = [run["name"] for run in runs]
    drawn: list[dict[str, Any]] = [{"color": METHODS[(place + 3) % len(METHODS)]} for place in range(len(runs))]
    with style():
        figure, every = panels(width, 2, height=2.2, left=0.62, top=key_room(width, names) + 0.28, share=False)
        for run, stroke in zip(runs, drawn, strict=True):
            points = sorted(run["points"], key=lambda point: float(point["fanout"]))
            trained = [point for point in points if point["rate"] is None]
            for axes, name, unit in zip(every, ("fanout", "flops_per_token"), (1, 1e-6), strict=True):
                x, y = (array([unit * point[name] for point in points]), array([point["loss"] for point in points]))
                axes.plot(x, y, **stroke, marker="o", markerfacecolor="white")
                for point in trained:
                    axes.plot([unit * point[name]], [point["loss"]], **stroke, marker="o", markersize=7)
        every[0].set_title("loss (nats per token)")
        outer_labels(every, "", "")
        every[0].set_xlabel("routed experts per token", loc="right")
        every[1].set_xlabel("MFLOPs per token, forward", loc="right")
        key(figure, names, drawn)
    return figure

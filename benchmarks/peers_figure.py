"""The roofline of `peers.py`: what each contestant reached, over what the case allows at most."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from expert_threshold.analysis.figures.axes import log_ticks
from expert_threshold.analysis.figures.style import INK, METHODS, MUTED, WIDE, style

Row = dict[str, Any]
MARKERS = {"dense": "_", "plain": "v", "transformers": "D", "scattermoe": "P", "megablocks": "X", "sonicmoe": "h"}
"""By the first word of a contestant's name; ours are full circles, others' markers are open."""


def draw(rows: list[Row], path: Path) -> None:
    """Left forward, right forward + backward; a thin line holds together what computed the same."""
    from matplotlib.figure import Figure

    timed = [row for row in rows if row["status"] == "timed"]
    # Dense is the same in shapes that differ in the number of experts alone.
    timed = [row for row in timed if not (row["contestant"].startswith("dense") and "-" in row["shape"])]
    if not timed:
        return
    with style():
        figure = Figure(figsize=(WIDE, 4.9), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for panel, title, prefix in zip(axes, ("forward", "forward + backward"), ("forward_", ""), strict=True):
            panel.set_title(title)
            _panel(panel, timed, prefix)
        axes[0].set_ylabel("TFLOP/s, of assigned rows")
        handles, labels = axes[1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
        figure.savefig(path, dpi=200, facecolor="white")


def _panel(axes: Any, rows: list[Row], prefix: str) -> None:
    product, copy = (statistics.median(row[key] for row in rows) for key in ("product_tflops", "copy_gb_per_second"))

    def place(row: Row) -> tuple[float, float]:
        """FLOP per byte, and TFLOP/s were the product beside the case as fast as the median, without the drift."""
        return row[f"{prefix}flops"] / row[f"{prefix}bytes"], row[f"{prefix}share_of_product"] * product

    ridge = product / (copy / 1e3)
    intensities = [ridge, *(place(row)[0] for row in rows)]
    left, right = min(intensities) / 2, max(intensities) * 1.6
    axes.plot([left, ridge, right], [left * copy / 1e3, product, product], color=INK, linewidth=1.2, zorder=1)
    said = f"roof: product {product:.3g} TFLOP/s, copy {copy:,.0f} GB/s"
    axes.text(0.99, 0.02, said, transform=axes.transAxes, ha="right", va="bottom", fontsize=7, color=INK)
    cases: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if not row["contestant"].startswith("dense"):
            cases.setdefault(f"{row['shape']} × {row['fanout']}", []).append(place(row))
    label_at = 0.0  # a label is a little to the right of the one before, for cases of like intensity
    for label, points in sorted(cases.items(), key=lambda case: case[1][0][0]):
        x, label_at = points[0][0], max(points[0][0], label_at * (right / left) ** 0.03)
        heights = [min(y for _, y in points), product, product * 1.12]
        axes.plot([x, x, label_at], heights, color=MUTED, linewidth=0.5, alpha=0.5, zorder=0)
        axes.text(label_at, product * 1.15, label, rotation=55, fontsize=6.5, color=MUTED, rotation_mode="anchor")
    for number, name in enumerate(dict.fromkeys(row["contestant"] for row in rows)):
        x, y = zip(*(place(row) for row in rows if row["contestant"] == name), strict=True)
        colour, ours = METHODS[number % len(METHODS)], name.startswith("ours")
        fill = {"markeredgecolor": colour, "markerfacecolor": colour if ours else "white"}
        axes.plot(x, y, MARKERS.get(name.split()[0], "o"), label=name, zorder=3 if ours else 2, markersize=6, **fill)
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(None, product * 3.2))
    axes.set_xlabel("FLOP per byte that must be moved")
    for axis in (axes.xaxis, axes.yaxis):
        log_ticks(axis)

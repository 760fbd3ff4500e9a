"""The roofline of `peers.py`: what each contestant reached, over what the case allows at most."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from expert_threshold.analysis.figures.style import INK, METHODS, MUTED, WIDE, style

Row = dict[str, Any]

# By the beginning of the name: colour and marker. Open markers are others' code or plain PyTorch, full ones are ours.
LOOKS = {
    "dense (ours)": (METHODS[0], "_"),
    "dense": (METHODS[11], "_"),
    "plain loop": (METHODS[11], "v"),
    "plain grouped_mm": (METHODS[5], "^"),
    "transformers eager": (METHODS[9], "v"),
    "transformers batched_mm": (METHODS[9], "s"),
    "transformers": (METHODS[1], "D"),
    "scattermoe": (METHODS[4], "P"),
    "megablocks": (METHODS[10], "X"),
    "sonicmoe": (METHODS[8], "h"),
    "ours reference": (METHODS[2], "o"),
    "ours static": (METHODS[7], "s"),
    "ours grouped by PyTorch": (METHODS[0], "s"),
    "ours triton": (METHODS[6], "^"),
    "ours": (METHODS[3], "o"),
}


def draw(rows: list[Row], path: Path) -> None:
    """Left forward, right forward + backward; a thin line holds together what computed the same."""
    from matplotlib.figure import Figure

    timed = [row for row in rows if row["status"] == "timed"]
    timed = [
        row for row in timed if not (row["contestant"].startswith("dense") and "-" in row["shape"])
    ]  # seen already
    if not timed:
        return
    with style():
        figure = Figure(figsize=(WIDE, 4.9), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for place, prefix in enumerate(("forward_", "")):
            _panel(axes[place], timed, prefix)
        axes[0].set_ylabel("TFLOP/s, of assigned rows")
        axes[0].set_title("forward")
        axes[1].set_title("forward + backward")
        handles, labels = axes[1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
        figure.savefig(path, dpi=200, facecolor="white")


def _panel(axes: Any, rows: list[Row], prefix: str) -> None:
    product, copy = (statistics.median(row[key] for row in rows) for key in ("product_tflops", "copy_gb_per_second"))
    cases: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        cases.setdefault((row["shape"], row["fanout"]), []).append(row)
    places, reached = [_intensity(row, prefix) for row in rows], [_reached(row, prefix, product) for row in rows]
    ridge = product / (copy / 1e3)
    left, right = min(*places, ridge) / 2, max(places) * 1.6
    axes.plot([left, ridge, right], [left * copy / 1e3, product, product], color=INK, linewidth=1.2, zorder=1)
    said = f"roof: product {product:.3g} TFLOP/s, copy {copy:,.0f} GB/s"
    axes.text(0.99, 0.02, said, transform=axes.transAxes, ha="right", va="bottom", fontsize=7, color=INK)
    labels: list[tuple[float, str]] = []
    for (shape, fanout), here in cases.items():
        routed = [row for row in here if not row["contestant"].startswith("dense")]
        if routed:
            place, heights = _intensity(routed[0], prefix), [_reached(row, prefix, product) for row in routed]
            axes.plot([place, place], [min(heights), product], color=MUTED, linewidth=0.5, alpha=0.5, zorder=0)
            labels.append((place, f"{shape} × {fanout}"))
    for (place, label), (moved, _) in zip(sorted(labels), _apart(labels, (right / left) ** 0.03), strict=True):
        axes.plot([place, moved], [product, product * 1.12], color=MUTED, linewidth=0.5, alpha=0.5, zorder=0)
        axes.text(moved, product * 1.15, label, rotation=55, fontsize=6.5, color=MUTED, rotation_mode="anchor")
    for name in dict.fromkeys(row["contestant"] for row in rows):
        mine = [row for row in rows if row["contestant"] == name]
        axes.plot(
            [_intensity(row, prefix) for row in mine],
            [_reached(row, prefix, product) for row in mine],
            linestyle="",
            label=name,
            zorder=3 if name.startswith("ours") else 2,
            **_look(name),
        )
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(min(reached) / 1.4, product * 3.2))
    axes.set_xlabel("FLOP per byte that must be moved")
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        ticks = [base * 10**power for power in range(-4, 5) for base in (1, 3) if low <= base * 10**power <= high]
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ticks([], minor=True)


def _apart(labels: list[tuple[float, str]], step: float) -> list[tuple[float, str]]:
    """Places at least a factor `step` apart, none moved to the left."""
    moved: list[tuple[float, str]] = []
    for place, label in sorted(labels):
        moved.append((max(place, moved[-1][0] * step) if moved else place, label))
    return moved


def _reached(row: Row, prefix: str, product: float) -> float:
    """TFLOP/s, were the product beside the case as fast as the median product: what the machine drifted is left out."""
    return float(row[f"{prefix}share_of_product"] * product)


def _intensity(row: Row, prefix: str) -> float:
    return float(row[f"{prefix}flops"] / row[f"{prefix}bytes"])


def _look(name: str) -> dict[str, Any]:
    colour, marker = next(look for beginning, look in LOOKS.items() if name.startswith(beginning))
    full = name.startswith(("ours", "dense"))
    size = 9 if marker == "_" else 5.5
    width = 1.8 if marker == "_" else 1.2
    return {
        "marker": marker,
        "markersize": size,
        "markeredgecolor": colour,
        "markerfacecolor": colour if full else "white",
        "markeredgewidth": width,
    }

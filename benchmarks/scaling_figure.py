"""The figure of docs/scaling.md: bytes that were counted, and efficiency by the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from expert_threshold.analysis.figures.axes import panels
from expert_threshold.analysis.figures.style import DASHES, METHODS, MUTED, WIDE, style

COLOURS = {"replicate": METHODS[0], "shard": METHODS[1], "expert_parallel": METHODS[3]}
KINDS = {
    "gradients": METHODS[7],
    "weights": METHODS[2],
    "all_to_all": METHODS[3],
    "selection": METHODS[1],
    "observations": METHODS[4],
}


def draw(results: Path, to: Path) -> None:
    """Draw bytes.jsonl and model.jsonl of the folder `results`."""
    counted, modelled = (_read(results / name) for name in ("bytes.jsonl", "model.jsonl"))
    modelled = [row for row in modelled if row["preset"] == modelled[0]["preset"]]
    with style():
        figure, axes = panels(WIDE, 3, 2.0, share=False)
        _bytes(axes[0], counted)
        for place, scaling in ((1, "strong"), (2, "weak")):
            _efficiency(axes[place], [row for row in modelled if row["scaling"] == scaling], scaling)
        figure.savefig(to, facecolor="white", bbox_inches="tight", pad_inches=0.1, metadata={"Date": None})


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _bytes(axes: Any, rows: list[dict[str, Any]]) -> None:
    ranks = max(row["ranks"] for row in rows)
    rows = [row for row in rows if row["ranks"] == ranks and row["layout"] == "expert_parallel"]
    for kind, colour in KINDS.items():
        points = sorted((row["tokens_per_rank"], row["bytes_per_token"]) for row in rows if row["kind"] == kind)
        if points:
            axes.plot(
                *zip(*points, strict=True),
                color=colour,
                marker="o",
                linestyle=DASHES[kind == "weights"],
                label=kind.replace("_", "-"),
            )
    axes.set(xscale="log", yscale="log", xlabel="tokens of a rank in a step")
    axes.set_ylim(bottom=min(row["bytes_per_token"] for row in rows if row["kind"] in KINDS) / 100)
    ticks = sorted({row["tokens_per_rank"] for row in rows})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xticks([], minor=True)
    amounts = [10**power for power in range(6) if axes.get_ylim()[0] < 10**power < axes.get_ylim()[1]]
    axes.set_yticks(amounts, [f"{amount:,}" for amount in amounts])
    axes.set_yticks([], minor=True)
    axes.set_title(f"bytes per token, counted, {ranks} ranks")
    axes.legend(frameon=False, fontsize=7, labelcolor=MUTED, loc="lower left")


def _efficiency(axes: Any, rows: list[dict[str, Any]], scaling: str) -> None:
    names = ("gpus", "efficiency", "efficiency_serial")
    for layout, colour in COLOURS.items():
        points = sorted(tuple(row[name] for name in names) for row in rows if row["layout"] == layout)
        gpus, overlapped, serial = zip(*points, strict=True)
        axes.fill_between(gpus, serial, overlapped, color=colour, alpha=0.15, linewidth=0)
        axes.plot(gpus, overlapped, color=colour, label=layout.replace("_", " "))
    axes.set(xscale="log", ylim=(0, 1.02), xlabel="GPUs")
    ticks = sorted({row["gpus"] for row in rows})[:: 1 if scaling == "strong" else 3]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_title("efficiency, modelled, " + ("one step shared out" if scaling == "strong" else "equal work for each"))
    axes.legend(frameon=False, fontsize=7, labelcolor=MUTED, loc="lower left")

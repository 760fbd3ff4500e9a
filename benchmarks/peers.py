"""Layers of experts, ours and others', side by side in one run: time, memory, share of what the machine can multiply.

    python benchmarks/peers.py [--to FOLDER] [--shapes 256 512 d12 …] [--fanouts 1 2 8] [--tokens N] [--dtype auto]
        [--repeats N] [--threads 2] [--contestants NAME …]
    python benchmarks/peers.py --to FOLDER --redraw

Every contestant of `peers_contestants.py` computes the same sum over the same tokens; its output and its gradients are
compared with the definition in float32 before it is timed, and what is wrong or cannot run here is said, not timed.
Routers and shared experts are left out. Repetitions are interleaved, beside a large product and a large copy, whose
rates are the roof. FLOPs are those of rows that were assigned, so `ratio_to_dense` is time per FLOP over that of the
faster of two dense feed-forwards. kept_bytes: storages kept for backward, parameters left out, the input counted once.

Shapes: d12 and d20 are the paper's, a number is a d_model; experts are twice as wide. 16 experts, or with -fine64 and
-fine256 as many, the narrower and the more of them per token, and with -more64 and -more256 as many of the same width
and as many more tokens. So tokens per expert and active width are the same in all.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bare import origin
from common import machine, positive, run
from peers_contestants import Case, Shape, contestants
from peers_measure import Row, measure
from rich.console import Console
from rich.progress import Progress

from expert_threshold.analysis.figures.plot import log_ticks
from expert_threshold.analysis.figures.style import INK, METHODS, MUTED, WIDE, style
from expert_threshold.analysis.results import markdown
from expert_threshold.train.device import gc_frozen, pick_device, pick_dtype

PAPER = {"d12": 768, "d20": 1280}
SHAPES = (("256", "256-fine64", "256-fine256", "512", "d12"), ("d12", "d12-fine64", "d12-fine256", "d20"))  # CPU, CUDA
TABLES = (
    ("Forward + backward: TFLOP/s", "tflops", ".3g"),
    ("Forward + backward: share of the product's rate", "share_of_product", ".2f"),
    ("Forward + backward: time per FLOP over the faster dense one's", "ratio_to_dense", ".2f"),
    ("Forward + backward: time per FLOP over dense in plain PyTorch", "ratio_to_plain_dense", ".2f"),
    ("Forward: time per FLOP over the faster dense one's", "forward_ratio_to_dense", ".2f"),
    ("Kept for backward: bytes over the leaner dense one's", "kept_ratio_to_dense", ".2f"),
    ("Forward + backward: nanoseconds per token", "ns_per_token", ",.0f"),
    ("Peak of forward + backward: bytes", "peak_bytes", ",.0f"),
)
MARKERS = {"dense": "_", "plain": "v", "transformers": "D", "scattermoe": "P", "megablocks": "X", "sonicmoe": "h"}
"""By the first word of a contestant's name; ours are full circles, others' markers are open."""


def shape_named(name: str, fanout: int, tokens: int) -> Shape:
    """Raises ValueError with the remedy."""
    parts = re.fullmatch(r"(d12|d20|\d+)(?:-(fine|more)(\d+))?", name)
    if parts is None:
        raise ValueError(f"--shapes {name} is no shape; use d12, d20, a d_model, or one of them with -fine64, say")
    base, kind, count = parts.groups()
    d_model, experts = PAPER.get(base) or int(base), int(count or 16)
    times = experts // 16
    finer, more = (times, 1) if kind == "fine" else (1, times)
    if experts % 16 or d_model % 64 or 2 * d_model % (8 * finer) or not 1 <= fanout <= 16:
        raise ValueError(
            f"--shapes {name} --fanouts {fanout}: use a d_model that 64 divides, experts that 16 divides and that "
            "leave each a width that 8 divides, and fanouts of 1 to 16"
        )
    return Shape(name, d_model, 2 * d_model // finer, experts, fanout * finer, tokens * more)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, help="a folder for results.jsonl, results.md and roofline.png")
    parser.add_argument("--shapes", nargs="+", help=f"default: {' '.join(SHAPES[0])}; CUDA: {' '.join(SHAPES[1])}")
    parser.add_argument("--fanouts", type=int, nargs="+", default=[1, 2, 8], help="of 16 experts")
    parser.add_argument("--fine-fanouts", type=int, nargs="+", help="with more experts; default: 1; CUDA: as --fanouts")
    parser.add_argument("--patience", type=float, default=60, help="times dense's time, beyond which none is timed")
    parser.add_argument("--tokens", type=positive, help="default: 4096; CUDA: 65536")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--repeats", type=positive, help="default: 5; CUDA: 20")
    parser.add_argument("--threads", type=positive, default=2, help="of the CPU")
    parser.add_argument("--contestants", nargs="+", choices=list(contestants()), metavar="NAME", help="default: all")
    parser.add_argument("--redraw", action="store_true", help="tables and figure of the results.jsonl that is there")
    arguments = parser.parse_args()
    if arguments.redraw and not arguments.to:
        parser.error("--redraw needs --to FOLDER")
    return arguments


def main() -> None:
    arguments = parse()
    records = arguments.to and arguments.to / "results.jsonl"
    if arguments.redraw:
        if not records.exists():
            raise ValueError(f"--redraw: {records} does not exist; measure with --to {arguments.to} first")
        rows = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]
    else:
        rows = []
        for found in measured(arguments):
            rows += found
            if records:  # as they come, so that an interrupted run keeps its results
                records.parent.mkdir(parents=True, exist_ok=True)
                records.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    text = to_markdown(rows)
    print(text)
    if arguments.to:
        (arguments.to / "results.md").write_text(text, encoding="utf-8")
        draw(rows, arguments.to / "roofline.png")


def measured(arguments: argparse.Namespace) -> Iterator[list[Row]]:
    """Yield each case's rows."""
    device = pick_device("auto")
    cuda = device.type == "cuda"
    dtype = pick_dtype(arguments.dtype, device)
    tokens, repeats = arguments.tokens or (65536 if cuda else 4096), arguments.repeats or (20 if cuda else 5)
    fine = arguments.fine_fanouts or (arguments.fanouts if cuda else [1])
    shapes = arguments.shapes or SHAPES[cuda]
    fanouts = [(name, fanout) for name in shapes for fanout in (fine if "-" in name else arguments.fanouts)]
    cases = [(shape_named(name, fanout, tokens), fanout) for name, fanout in fanouts]
    torch.set_num_threads(arguments.threads)
    here = {"dtype": str(dtype).removeprefix("torch."), "repeats": repeats} | machine(device) | origin()
    names = arguments.contestants or list(contestants())
    with Progress(console=Console(stderr=True)) as progress:
        for shape, fanout in progress.track(cases, description="cases"):
            known = {"benchmark": "peers", "shape": shape.name, **shape.sizes(), "fanout": fanout}
            with gc_frozen():
                rows = measure(Case(shape, dtype, device), names, repeats, arguments.patience)
            yield [known | row | here for row in rows]


def roof(rows: list[Row]) -> tuple[float, float]:
    """Return the medians of the product's TFLOP/s and of the copy's GB/s beside the cases."""
    product, copy = (statistics.median(row[key] for row in rows) for key in ("product_tflops", "copy_gb_per_second"))
    return product, copy


def to_markdown(rows: list[Row]) -> str:
    """Return a line for each shape and fanout and a column for each contestant, table by table."""
    timed, first = [row for row in rows if row["status"] == "timed"], rows[0]
    parts = []
    if timed:
        where = first.get("gpu") or f"{first['cpu']}, {first['threads']} threads"
        product, copy = roof(timed)
        parts.append(
            f"{where}; torch {first['torch']}, {first['dtype']}, {first['repeats']} repetitions, {first['date']}, "
            f"commit {(first['commit'] or '')[:8]}. Beside the cases, medians: a product at {product * 1e3:,.0f} "
            f"GFLOP/s, a copy at {copy:,.0f} GB/s.\n"
        )
    names = list(dict.fromkeys(row["contestant"] for row in timed))
    for title, key, digits in TABLES:
        cells = {
            (row["shape"], row["fanout"], row["contestant"]): f"{row[key]:{digits}}" for row in timed if key in row
        }
        cases = dict.fromkeys(case[:2] for case in cells)
        lines = [
            [f"{shape}, {fanout}", *(cells.get((shape, fanout, n), "–") for n in names)] for shape, fanout in cases
        ]
        parts += [f"## {title}\n", markdown(["shape, fanout", *names], lines)] if lines else []
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] != "timed":
            said = f"{row['contestant']}: {'WRONG: ' if row['status'] == 'wrong' else ''}{row['reason']}"
            reasons.setdefault(said, []).append(f"{row['shape']} × {row['fanout']}")
    count = len({(row["shape"], row["fanout"]) for row in rows})
    left_out = [f"- {said}" + ("" if len(at) == count else f" ({', '.join(at)})") for said, at in reasons.items()]
    packages = ", ".join(sorted({row["package"] for row in rows if "package" in row}))
    return "\n".join([*parts, f"Packages: {packages or 'none'}.\n", "## Not timed\n", *left_out, ""])


def draw(rows: list[Row], path: Path) -> None:
    """Draw what each contestant reached under the roof, forward at the left, with backward at the right."""
    from matplotlib.figure import Figure

    # Dense is the same in shapes that differ in the number of experts alone.
    timed = [row for row in rows if row["status"] == "timed"]
    timed = [row for row in timed if not (row["contestant"].startswith("dense") and "-" in row["shape"])]
    if not timed:
        return
    with style():
        figure = Figure(figsize=(WIDE, 4.9), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for panel, title, prefix in zip(axes, ("forward", "forward + backward"), ("forward_", ""), strict=True):
            panel.set_title(title)
            draw_panel(panel, timed, prefix)
        axes[0].set_ylabel("TFLOP/s, of assigned rows")
        figure.legend(
            *axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=8
        )
        figure.savefig(path, dpi=200, facecolor="white")


def draw_panel(axes: Any, rows: list[Row], prefix: str) -> None:
    """Draw a point for each row; a thin line connects what computed the same."""
    product, copy = roof(rows)

    def place(row: Row) -> tuple[float, float]:
        """Return FLOP per byte, and TFLOP/s were the product beside the case as fast as the median, without drift."""
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


if __name__ == "__main__":
    run(main)

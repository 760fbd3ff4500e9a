"""Layers of experts, ours and others', side by side in one run: time, memory, share of what the machine can multiply.

    python benchmarks/peers.py [--to FOLDER] [--json] [--shapes 256 512 d12 …] [--fanouts 1 2 8] [--tokens N]
        [--dtype auto] [--device auto] [--repeats N] [--threads 2] [--contestants NAME …]
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
import sys
from pathlib import Path

import torch
from bare import origin
from common import machine, positive
from peers_contestants import Case, Shape, contestants
from peers_figure import draw
from peers_measure import Row, measure
from peers_table import to_markdown
from rich.console import Console
from rich.progress import Progress

from expert_threshold.train.device import gc_frozen, pick_device, pick_dtype

PAPER = {"d12": 768, "d20": 1280}
SHAPES = (("256", "256-fine64", "256-fine256", "512", "d12"), ("d12", "d12-fine64", "d12-fine256", "d20"))  # CPU, CUDA


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
    parser.add_argument("--json", action="store_true", help="one flat JSON object a line instead of tables")
    parser.add_argument("--shapes", nargs="+", help=f"default: {' '.join(SHAPES[0])}; CUDA: {' '.join(SHAPES[1])}")
    parser.add_argument("--fanouts", type=int, nargs="+", default=[1, 2, 8], help="of 16 experts")
    parser.add_argument("--fine-fanouts", type=int, nargs="+", help="with more experts; default: 1; CUDA: as --fanouts")
    parser.add_argument("--patience", type=float, default=60, help="times dense's time, beyond which none is timed")
    parser.add_argument("--tokens", type=positive, help="default: 4096; CUDA: 65536")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=positive, help="default: 5; CUDA: 20")
    parser.add_argument("--threads", type=positive, default=2, help="of the CPU")
    parser.add_argument("--contestants", nargs="+", choices=list(contestants()), metavar="NAME", help="default: all")
    parser.add_argument("--redraw", action="store_true", help="tables and figure of the results.jsonl that is there")
    arguments = parser.parse_args()
    if arguments.redraw and not arguments.to:
        parser.error("--redraw needs --to FOLDER")
    return arguments


def write(folder: Path, rows: list[Row]) -> None:
    (folder / "results.md").write_text(to_markdown(rows), encoding="utf-8")
    draw(rows, folder / "roofline.png")


def main() -> None:
    arguments = parse()
    try:
        if arguments.redraw:
            write(arguments.to, read(arguments.to))
            return
        device = pick_device(arguments.device)
        dtype, cases = pick_dtype(arguments.dtype, device), chosen_cases(arguments, device.type == "cuda")
    except ValueError as refusal:
        print(refusal, file=sys.stderr)
        sys.exit(2)
    torch.set_num_threads(arguments.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    repeats = arguments.repeats or (20 if device.type == "cuda" else 5)
    here = {"repeats": repeats} | machine(device) | origin()
    rows: list[Row] = []
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=sum(cost(shape) for shape, _ in cases))
        for shape, fanout in cases:
            progress.update(bar, description=f"{shape.name}, fanout {fanout}")
            with gc_frozen():
                measured = measure(
                    Case(shape, dtype, device),
                    fanout,
                    arguments.contestants or list(contestants()),
                    repeats,
                    arguments.patience,
                )
            rows += (found := [row | here for row in measured])
            if arguments.to:
                append(arguments.to, found, first=len(rows) == len(found))
            for row in found if arguments.json else []:
                print(json.dumps(row), flush=True)
            progress.advance(bar, cost(shape))
    if arguments.to:
        write(arguments.to, rows)
    if not arguments.json:
        print(to_markdown(rows))


def chosen_cases(arguments: argparse.Namespace, cuda: bool) -> list[tuple[Shape, int]]:
    shapes, tokens = arguments.shapes or SHAPES[cuda], arguments.tokens or (65536 if cuda else 4096)
    fine = arguments.fine_fanouts or (arguments.fanouts if cuda else [1])
    fanouts = {name: fine if "-" in name else arguments.fanouts for name in shapes}
    return [(shape_named(name, fanout, tokens), fanout) for name in shapes for fanout in fanouts[name]]


def append(folder: Path, rows: list[Row], *, first: bool) -> None:
    """Write records as they come, so that an interrupted run keeps its results."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "results.jsonl").open("w" if first else "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read(folder: Path) -> list[Row]:
    path = folder / "results.jsonl"
    if not path.exists():
        raise ValueError(f"--redraw: {path} does not exist; measure with --to {folder} first")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def cost(shape: Shape) -> int:
    return shape.tokens * shape.d_model * shape.width * shape.experts_per_token


if __name__ == "__main__":
    main()

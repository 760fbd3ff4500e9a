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
import gc
import json
import math
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from common import machine, origin, time_interleaved
from peers_contestants import INPUTS, UNTRIED, Case, Entry, Shape, UnavailableError, contestants, version
from peers_figure import draw
from peers_table import to_markdown
from rich.console import Console
from rich.progress import Progress

from expert_threshold.train.device import pick_device, pick_dtype

PAPER = {"d12": 768, "d20": 1280}
SHAPES = (("256", "256-fine64", "256-fine256", "512", "d12"), ("d12", "d12-fine64", "d12-fine256", "d20"))  # CPU, CUDA
TOLERANCE = {torch.bfloat16: 0.1, torch.float32: 5e-3}  # of a row's norm; that of TF32 passes
Row = dict[str, Any]


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


def work(entry: Entry, case: Case) -> dict[str, int]:
    """FLOPs, and the bytes if every row of every expert were moved once, as were weights and pre-activations."""
    rows, experts, d_model = int(entry.loads.sum()), int((entry.loads > 0).sum()), case.shape.d_model
    weights, kept = entry.matrices * experts * d_model * entry.width, rows * entry.width * (entry.matrices - 1)
    flops = 2 * entry.matrices * d_model * entry.width * rows
    size = case.x.element_size()
    return {
        "forward_flops": flops,
        "flops": 3 * flops,
        "forward_bytes": size * (2 * rows * d_model + weights + kept),  # x, y; weights; pre-activations
        "bytes": size * (5 * rows * d_model + 3 * weights + 2 * kept),  # x twice, y, dy, dx; weights twice, gradients
    }


def kept_for_backward(entry: Entry) -> int:
    """Bytes of the storages that autograd keeps, parameters left out."""
    parameters = {leaf.untyped_storage().data_ptr() for name, leaf in entry.leaves.items() if name not in INPUTS}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = entry.forward()
    del y
    return sum(kept.values())


def error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest error of a row over the root mean square of the rows' norms; NaN is infinite."""
    worst = 0.0
    for name, exact in expected.items():
        if name in found:
            far, size = ((t.flatten(1).norm(dim=1)) for t in (found[name].float() - exact, exact))
            off = float(far.max() / size.square().mean().sqrt().clamp(min=1e-30))
            worst = max(worst, off) if math.isfinite(off) else math.inf
    return worst


def forward_backward(entry: Entry, case: Case) -> None:
    torch.autograd.grad(entry.forward(), list(entry.leaves.values()), case.grad)


def once(entry: Entry, case: Case) -> float:
    return time_interleaved({"": lambda: forward_backward(entry, case)}, 1, 0, case.device)[""][0]


def reason(failure: Exception) -> str:
    """Its first line; of failures that were not foreseen their kind, too."""
    line = (str(failure).strip().splitlines() or [""])[0]
    foreseen = isinstance(failure, UnavailableError | ImportError | ValueError)
    return line if foreseen and line else f"{type(failure).__name__}: {line}"


def measure(case: Case, fanout: int, names: list[str], repeats: int, patience: float) -> list[Row]:
    """A row for each contestant. patience: times the dense one's time, beyond which nothing is timed."""
    shape = case.shape
    known = {
        "benchmark": "peers",
        "shape": shape.name,
        "fanout": fanout,
        **shape._asdict(),
        "dtype": str(case.dtype).removeprefix("torch."),
    }
    del known["name"]
    rows: dict[str, Row] = {}
    entries: dict[str, Entry] = {}
    dense = float("inf")
    for name in names:
        rows[name] = {**known, "contestant": name, **version(name)}
        try:
            entry = contestants()[name](case)
            off = error(case.outcome(entry.forward, entry.leaves), entry.expected)
        except Exception as failure:  # of whatever kind: the others go on
            untried = f" ({UNTRIED[name]})" if name in UNTRIED else ""
            rows[name] |= {"status": "not run", "reason": reason(failure) + untried}
            continue
        rows[name] |= {"status": "timed", "error": float(f"{off:.3g}"), "rows": int(entry.loads.sum())}
        rows[name]["largest_load"] = round(float(entry.loads.max() / entry.loads.float().mean()), 3)
        if off > TOLERANCE[case.dtype]:
            rows[name] |= {"status": "wrong", "reason": f"a row is off by {off:.2g} of the norm"}
            continue
        entry = entry._replace(expected={})
        dense = min(dense, once(entry, case)) if name.startswith("dense") else dense
        if (slower := once(entry, case) / dense) > patience:
            rows[name] |= {"status": "not run", "reason": f"too slow to time: {slower:.0f} times dense, once"}
            continue
        entries[name] = entry
        rows[name] |= work(entry, case) | memory(entries[name], case)
    for computed in ("of_any_fanout", "of_top_k"):
        case.__dict__.pop(computed, None)
    gc.collect()
    times = clock(entries, case, repeats)
    for name in entries:
        rows[name] |= rates(rows[name], times[name], times)
    compare([rows[name] for name in entries])
    return list(rows.values())


def memory(entry: Entry, case: Case) -> Row:
    found: Row = {"kept_bytes": kept_for_backward(entry)}
    if case.device.type == "cuda":
        gc.collect()
        before = torch.cuda.memory_allocated(case.device)
        torch.cuda.reset_peak_memory_stats(case.device)
        forward_backward(entry, case)
        found["peak_bytes"] = torch.cuda.max_memory_allocated(case.device) - before
    return found


def clock(entries: dict[str, Entry], case: Case, repeats: int) -> dict[str, tuple[float, float]]:
    """Median seconds of forward and of forward + backward; of the product and the copy, both the same."""
    on, cuda = case.device, case.device.type == "cuda"
    side, copied = (8192, 2**31) if cuda else (2048, 2**28)
    square = torch.randn(side, side, device=on).to(case.dtype)
    source = torch.zeros(copied, dtype=torch.uint8, device=on)
    target = torch.empty_like(source)
    calls: dict[str, Any] = {"product": lambda: square @ square, "copy": lambda: target.copy_(source)}
    for name, entry in entries.items():
        calls[f"{name}/forward"] = entry.forward
        calls[f"{name}/both"] = lambda entry=entry: forward_backward(entry, case)
    times = {name: statistics.median(s) for name, s in time_interleaved(calls, repeats, warmup=1, on=on).items()}
    medians = {name: (times[f"{name}/forward"], times[f"{name}/both"]) for name in entries}
    product, copy = 2 * side**3 / times["product"], 2 * copied / times["copy"]
    return medians | {"product": (product, product), "copy": (copy, copy)}


def rates(row: Row, seconds: tuple[float, float], times: dict[str, tuple[float, float]]) -> Row:
    product, copy = times["product"][0], times["copy"][0]
    found: Row = {}
    for prefix, taken in zip(("forward_", ""), seconds, strict=True):
        found |= {
            f"{prefix}ms": round(taken * 1e3, 4),
            f"{prefix}tflops": round(row[f"{prefix}flops"] / taken / 1e12, 4),
            f"{prefix}share_of_product": round(row[f"{prefix}flops"] / taken / product, 4),
            f"{prefix}ns_per_token": round(taken * 1e9 / row["tokens"], 1),
        }
    return found | {"product_tflops": round(product / 1e12, 4), "copy_gb_per_second": round(copy / 1e9, 2)}


def compare(rows: list[Row]) -> None:
    """Return ratios to the better dense contestant, measure by measure, and to the one in plain PyTorch."""
    dense = [row for row in rows if row["contestant"].startswith("dense")]
    plain = next((row for row in dense if row["contestant"] == "dense"), None)
    for row in rows if dense else []:
        for prefix in ("forward_", ""):
            best = max(other[f"{prefix}tflops"] for other in dense)
            row[f"{prefix}ratio_to_dense"] = round(best / row[f"{prefix}tflops"], 4)
        if plain is not None:
            row["ratio_to_plain_dense"] = round(plain["tflops"] / row["tflops"], 4)
        row["kept_ratio_to_dense"] = round(row["kept_bytes"] / min(other["kept_bytes"] for other in dense), 4)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, help="a folder for results.jsonl, results.md and roofline.png")
    parser.add_argument("--json", action="store_true", help="one flat JSON object a line instead of tables")
    parser.add_argument("--shapes", nargs="+", help=f"default: {' '.join(SHAPES[0])}; CUDA: {' '.join(SHAPES[1])}")
    parser.add_argument("--fanouts", type=int, nargs="+", default=[1, 2, 8], help="of 16 experts")
    parser.add_argument("--fine-fanouts", type=int, nargs="+", help="with more experts; default: 1; CUDA: as --fanouts")
    parser.add_argument("--patience", type=float, default=60, help="times dense's time, beyond which none is timed")
    parser.add_argument("--tokens", type=int, help="default: 4096; CUDA: 65536")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, help="default: 5; CUDA: 20")
    parser.add_argument("--threads", type=int, default=2, help="of the CPU")
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

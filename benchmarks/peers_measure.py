"""One case of `peers.py`: every contestant checked against the definition, then timed, and its memory counted."""

from __future__ import annotations

import gc
import itertools
import math
from functools import partial
from typing import Any

import torch
from bare import median_times, seconds_of
from peers_contestants import INPUTS, UNTRIED, Case, Entry, UnavailableError, contestants, version

TOLERANCE = {torch.bfloat16: 0.1, torch.float32: 5e-3}  # of a row's norm; that of TF32 passes
Row = dict[str, Any]


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


def reason(failure: Exception) -> str:
    """Its first line; of failures that were not foreseen their kind, too."""
    line = (str(failure).strip().splitlines() or [""])[0]
    foreseen = isinstance(failure, UnavailableError | ImportError | ValueError)
    return line if foreseen and line else f"{type(failure).__name__}: {line}"


def measure(
    case: Case, names: list[str], repeats: int, patience: float, roof: tuple[int, int] | None = None
) -> list[Row]:
    """A row for each contestant. patience: times the dense one's time, beyond which nothing is timed. roof: the side of
    the square product and the bytes of the copy beside them; None is large ones.
    """
    rows: dict[str, Row] = {}
    entries: dict[str, Entry] = {}
    dense = float("inf")
    for name in names:
        rows[name] = row = {"contestant": name, **version(name)}
        try:
            entry = contestants()[name](case)
            off = error(case.outcome(entry.forward, entry.leaves), entry.expected)
        except Exception as failure:  # of whatever kind: the others go on
            untried = f" ({UNTRIED[name]})" if name in UNTRIED else ""
            row |= {"status": "not run", "reason": reason(failure) + untried}
            continue
        row |= {"error": float(f"{off:.3g}"), "rows": int(entry.loads.sum())}
        row["largest_load"] = round(float(entry.loads.max() / entry.loads.float().mean()), 3)
        if off > TOLERANCE[case.dtype]:
            row |= {"status": "wrong", "reason": f"a row is off by {off:.2g} of the norm"}
            continue
        once = seconds_of(partial(forward_backward, entry, case), case.device)
        dense = min(dense, once) if name.startswith("dense") else dense
        if once / dense > patience:
            row |= {"status": "not run", "reason": f"too slow to time: {once / dense:.0f} times dense, once"}
            continue
        entries[name] = entry._replace(expected={})
        row |= {"status": "timed"} | work(entry, case) | memory(entry, case)
    for computed in ("of_any_fanout", "of_top_k"):
        case.__dict__.pop(computed, None)
    gc.collect()
    time_all(rows, entries, case, repeats, roof)
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


def time_all(
    rows: dict[str, Row], entries: dict[str, Entry], case: Case, repeats: int, roof: tuple[int, int] | None
) -> None:
    """Enter times and rates into the rows, of forward and of forward + backward, beside a product, a copy and dense."""
    on = case.device
    side, copied = roof or ((8192, 2**31) if on.type == "cuda" else (2048, 2**28))
    square = torch.randn(side, side, device=on).to(case.dtype)
    source = torch.zeros(copied, dtype=torch.uint8, device=on)
    target = torch.empty_like(source)
    calls: dict[str, Any] = {"product": lambda: square @ square, "copy": lambda: target.copy_(source)}
    for name, entry in entries.items():
        calls |= {f"forward_{name}": entry.forward, name: partial(forward_backward, entry, case)}
    seconds = median_times(calls, repeats, 1, on)
    product, copy = 2 * side**3 / seconds["product"], 2 * copied / seconds["copy"]
    for name, prefix in itertools.product(entries, ("forward_", "")):
        row, taken = rows[name], seconds[prefix + name]
        rate = row[f"{prefix}flops"] / taken
        row |= {
            f"{prefix}ms": round(taken * 1e3, 4),
            f"{prefix}tflops": float(f"{rate / 1e12:.5g}"),
            f"{prefix}share_of_product": float(f"{rate / product:.4g}"),
            f"{prefix}ns_per_token": round(taken * 1e9 / case.shape.tokens, 1),
            "product_tflops": float(f"{product / 1e12:.5g}"),
            "copy_gb_per_second": round(copy / 1e9, 2),
        }
    dense = [rows[name] for name in entries if name.startswith("dense")]
    for row in [rows[name] for name in entries] if dense else []:  # ratios to the better dense one, measure by measure
        for prefix in ("forward_", ""):
            best = max(other[f"{prefix}tflops"] for other in dense)
            row[f"{prefix}ratio_to_dense"] = round(best / row[f"{prefix}tflops"], 4)
        if "dense" in entries:
            row["ratio_to_plain_dense"] = round(rows["dense"]["tflops"] / row["tflops"], 4)
        row["kept_ratio_to_dense"] = round(row["kept_bytes"] / min(other["kept_bytes"] for other in dense), 4)

"""The layer of experts, beside dense feed-forwards, plain PyTorch and other packages, all in one run.

`benchmarks/peers.py` says what is equal for all and how it is measured. 16, 64 and 256 experts are as wide as the
preset's, so that fanout f costs f times a dense feed-forward of that width; "fine" ones are narrower, and a token gets
as many more of them. FLOPs are 2 · matrices · d_model · width of every row in forward, three times that with backward
(`peers_measure.work`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch
from peers_contestants import Case as Contest
from peers_contestants import Shape, contestants
from peers_measure import measure

from .setting import Case, Row, Setting
from .tuning import are_tuned, tune

FIELDS = ("d_model", "width", "experts", "experts_per_token", "tokens", "contestants")
TIMED = (
    "ms", "forward_ms", "tflops", "share_of_product", "forward_share_of_product", "kept_bytes", "ratio_to_dense",
)  # fmt: skip
"""The fields of a row whose status is "timed"."""
FANOUTS = (1, 8, 2)
LEFT_OUT = ("plain loop", "transformers batched_mm", "ours cpu", "ours reference")  # slow, or not for a GPU
DRY = ("dense", "dense (ours)", "plain grouped_mm", "ours grouped", "ours static")
PATIENCE = 40.0  # times dense's time, beyond which a contestant is not timed


def cases(setting: Setting) -> Iterator[Case]:
    """Yield shapes × fanouts, the paper's largest first, each shape's tiles before it."""
    tuned = set()
    for shape in shapes(setting):
        if (sizes := (shape.d_model, shape.width)) not in tuned:
            tuned.add(sizes)
            yield Case(f"tiles {shape.name}", lambda s=shape: tiles(s, setting), 25)
        name = f"{shape.name} fanout {shape.experts_per_token}"
        yield Case(name, lambda shape=shape: race(shape, setting), 12)


def shapes(setting: Setting) -> list[Shape]:
    """Return the shapes in the order of what is worth most."""
    if setting.dry:
        return [Shape("toy-2", 16, 16, 2, 1, 16)]
    d_models = {"d20": 1280, "d12": 768}
    tokens = 65_536
    wide = [
        Shape(f"{name}-{experts}", d, 2 * d, experts, fanout, tokens)
        for experts in (16, 64, 256)
        for name, d in d_models.items()
        for fanout in FANOUTS
    ]
    fine = [
        Shape(f"{name}-fine{experts}", d, 32 * d // experts, experts, experts // 16, tokens)
        for experts in (64, 256)
        for name, d in d_models.items()
    ]
    return [*wide, *fine]


def tiles(shape: Shape, setting: Setting) -> Row:
    """Choose tiles for a shape; they do not depend on the number of experts."""
    return row_of(shape) | tune(shape.d_model, shape.width, shape.experts, setting)


def row_of(shape: Shape) -> Row:
    return {name: value for name, value in shape._asdict().items() if name != "name"} | {"contestants": []}


def race(shape: Shape, setting: Setting) -> Row:
    """Check and time every contestant on one shape."""
    gc.collect()
    if setting.cuda:
        torch.cuda.empty_cache()
    names = [name for name in contestants() if name not in LEFT_OUT and (not setting.dry or name in DRY)]
    if setting.cuda and not are_tuned(shape.d_model, shape.width, setting):
        names.remove("ours triton")
    case = Contest(shape, setting.dtype, setting.device)
    rows = measure(
        case,
        shape.experts_per_token,
        names,
        setting.pick(10, 1),
        setting.pick(PATIENCE, float("inf")),
        setting.pick(None, (64, 2**16)),
    )
    told = set(row_of(shape)) | {"benchmark", "shape", "fanout"}
    return row_of(shape) | {"contestants": [{k: v for k, v in row.items() if k not in told} for row in rows]}


def lines(rows: dict[str, Row]) -> list[str]:
    """Return, for each shape and fanout, the best of ours, of dense and of others, forward with backward."""
    told: dict[str, list[str]] = {}
    for name, row in rows.items():
        timed = sorted((c for c in row["contestants"] if c["status"] == "timed"), key=lambda c: -c["tflops"])
        of = {kind: next((c for c in timed if c["contestant"].startswith(kind)), None) for kind in ("ours", "dense")}
        of["others"] = next((c for c in timed if not c["contestant"].startswith(("ours", "dense"))), None)
        best = ", ".join(f"{c['contestant']} {c['tflops']:.3g} ({c['share_of_product']:.0%})" for c in of.values() if c)
        wrong = [c["contestant"] for c in row["contestants"] if c["status"] == "wrong"]
        if timed or wrong:
            shape, _, fanout = name.partition(" ")
            told.setdefault(shape, []).append(f"{fanout} {best}" + (f" WRONG: {', '.join(wrong)}" if wrong else ""))
    return [f"{shape}, TFLOP/s (share of the product): {'; '.join(fanouts)}" for shape, fanouts in told.items()]

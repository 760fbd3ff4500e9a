"""The layer of experts, beside dense feed-forwards, plain PyTorch and other packages, all in one run.

`benchmarks/peers.py` says what is equal for all and how it is measured. 16, 64 and 256 experts are as wide as the
preset's, so that fanout f costs f times a dense feed-forward of that width; "fine" ones are narrower, and a token gets
as many more of them. FLOPs are 2 · matrices · d_model · width of every row in forward, three times that with backward
(`peers_measure.work`).
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch
from peers_contestants import Case as Contest
from peers_contestants import Shape, contestants
from peers_measure import measure

from .compile import launches
from .setting import Case, NotRunError, Row, Setting

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
    d_models, tokens = {"d20": 1280, "d12": 768}, 65_536
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
    """Let Triton's tuner choose tiles for a shape; they do not depend on the number of experts.

    The compiler is what takes long, so the candidates are compiled in many processes first, into Triton's cache on
    disk, where the tuner's choice is kept as well. Raises NotRunError without a card or without Triton.
    """
    if not setting.cuda:
        raise NotRunError("needs a card: tiles are chosen by time")
    try:
        from expert_threshold.kernels.gpu import experts as kernels
    except ImportError:
        raise NotRunError("triton is not installed") from None
    sizes = shape.d_model, shape.width, shape.experts
    compiled = compile_ahead(sizes, setting)
    kernels._tune(torch.Size((shape.experts, shape.width, shape.d_model)), shape.width, setting.dtype, setting.device)
    found = [
        {"kernel": kernel.__name__, **dict(zip(tuner.keys, key, strict=False)), "tiles": str(config)}
        for kernel, tuner in kernels.TUNED.items()
        for key, config in tuner.cache.items()
    ]
    return shape.sizes() | {"contestants": [], "compiled_ahead": compiled, "tiles": found}


def compile_ahead(sizes: tuple[int, int, int], setting: Setting) -> int:
    """Compile every product of a shape in every tile, in as many processes as there are cores; return how many.

    What does not compile, or not in the time left, is left to the tuner.
    """
    from expert_threshold.kernels.gpu.experts import CONFIGS

    count = sum(launch.is_product for launch in launches(*sizes))
    work = [(sizes, place, way) for way in range(len(CONFIGS)) for place in range(count)]
    done, most = 0, max(min(os.cpu_count() or 1, len(work), 16), 1)
    with ProcessPoolExecutor(most, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(compile_one, *each) for each in work]
        try:
            for future in as_completed(futures, timeout=max(setting.left - 10, 1)):
                done += future.exception() is None
        except TimeoutError:
            pool.shutdown(wait=False, cancel_futures=True)
    return done


def compile_one(sizes: tuple[int, int, int], place: int, way: int) -> None:
    """Compile one product in one tile as a launch on this machine's card would, which leaves it in Triton's cache."""
    from expert_threshold.kernels.gpu.experts import CONFIGS

    launch = [each for each in launches(*sizes) if each.is_product][place].tuned(CONFIGS[way])
    options = {"enable_fp_fusion": True, **launch.options}
    launch.kernel.warmup(*launch.arguments, grid=(1,), **launch.constants, **options)


def race(shape: Shape, setting: Setting) -> Row:
    """Check and time every contestant on one shape."""
    gc.collect()
    if setting.cuda:
        torch.cuda.empty_cache()
    names = [name for name in contestants() if name not in LEFT_OUT and (not setting.dry or name in DRY)]
    repeats, patience, roof = setting.pick((10, PATIENCE, None), (1, float("inf"), (64, 2**16)))
    case = Contest(shape, setting.dtype, setting.device)
    return shape.sizes() | {"contestants": measure(case, names, repeats, patience, roof)}


def lines(rows: dict[str, Row]) -> list[str]:
    """Return, for each shape and fanout, the best of ours, of dense and of others, forward with backward."""
    found: dict[str, list[str]] = {}
    for name, row in rows.items():
        timed = sorted((c for c in row["contestants"] if c["status"] == "timed"), key=lambda c: -c["tflops"])
        of = {kind: next((c for c in timed if c["contestant"].startswith(kind)), None) for kind in ("ours", "dense")}
        of["others"] = next((c for c in timed if not c["contestant"].startswith(("ours", "dense"))), None)
        best = ", ".join(f"{c['contestant']} {c['tflops']:.3g} ({c['share_of_product']:.0%})" for c in of.values() if c)
        wrong = [c["contestant"] for c in row["contestants"] if c["status"] == "wrong"]
        if timed or wrong:
            shape, _, fanout = name.partition(" ")
            found.setdefault(shape, []).append(f"{fanout} {best}" + (f" WRONG: {', '.join(wrong)}" if wrong else ""))
    return [f"{shape}, TFLOP/s (share of the product): {'; '.join(fanouts)}" for shape, fanouts in found.items()]

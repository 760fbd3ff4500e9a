"""The roofline of a measurement: rates of a large product and a large copy, timed alternately with its calls."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import NamedTuple

import torch
from bare import median_times, seconds_of

from .setting import Row, Setting

# Dense bfloat16 FLOP/s by NVIDIA's data sheets, without sparsity, by a part of the card's name; SXM where both exist.
PEAK = {"B200": 2250e12, "H200": 989.4e12, "H100": 989.4e12, "A100": 312e12}


class Roof(NamedTuple):
    """Rates measured in this process: FLOP/s of a square bfloat16 product, and bytes/s of a copy, read and written."""

    flops: float
    bytes: float


def square(side: int) -> float:
    """Return the FLOPs of a square product: side² outputs, of `side` multiplications and additions each."""
    return 2.0 * side**3


def under_roof(
    calls: dict[str, Callable[[], object]], setting: Setting, seconds: float = 2.0
) -> tuple[dict[str, float], Roof]:
    """Return each call's median seconds, and the roofline; all are timed alternately.

    seconds: about how long to repeat for; there are 3 to 30 repetitions, after warmup.
    """
    device = setting.device
    side, size = setting.pick((8192, 2**31) if setting.cuda else (2048, 2**28), (128, 2**20))
    a, b = (torch.randn(side, side, device=device).to(setting.dtype) for _ in range(2))
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    every = {**calls, "product": lambda: a @ b, "copy": lambda: target.copy_(source)}
    for call in every.values():  # libraries set themselves up, kernels are compiled and tuned
        call()
    once = sum(seconds_of(call, device) for call in every.values())
    repeats = setting.pick(max(3, min(30, int(seconds / max(once, 1e-6)))), 2)
    medians = median_times(every, repeats, 1, device)
    product, copy = medians.pop("product"), medians.pop("copy")
    return medians, Roof(square(side) / product, 2 * size / copy)


def beside_floor(seconds: float, flops: float, size: float, roof: Roof) -> Row:
    """Return a measured time beside the least that these FLOPs and bytes need.

    size: bytes if each input is read once and each output written once.
    """
    floor = max(flops / roof.flops, size / roof.bytes)
    return {
        "ms": round(seconds * 1e3, 4),
        "flops": flops,
        "bytes": size,
        "floor_ms": round(floor * 1e3, 4),
        "over_floor": round(seconds / floor, 3),
        "bound_by": "FLOPs" if flops / roof.flops > size / roof.bytes else "bytes",
        **rates(roof),
    }


def rates(roof: Roof) -> Row:
    return {
        "product_tflops": float(f"{roof.flops / 1e12:.5g}"),
        "copy_gb_per_second": float(f"{roof.bytes / 1e9:.5g}"),
    }


def peak(setting: Setting) -> float | None:
    """Return the card's FLOP/s in bfloat16 by its data sheet; None of a card that the table lacks."""
    if not setting.cuda:
        return None
    name = torch.cuda.get_device_name()
    return next((rate for part, rate in PEAK.items() if part in name), None)


def captured(call: Callable[[], object], setting: Setting, warmup: int = 3) -> Callable[[], object]:
    """Return a replay of the call as a CUDA graph, which leaves out the host's launches; on a CPU the call itself.

    warmup: calls before capture. Raises RuntimeError if the call waits for the device.
    """
    if not setting.cuda:
        return call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    gc.collect()
    torch.cuda.empty_cache()  # a capture has memory of its own, and cannot use what is cached
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay

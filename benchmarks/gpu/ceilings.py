"""Measure the limits of the card: bfloat16 products of several sizes, a copy, a read."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch
from bare import time_in_turn

from .roof import peak, square
from .setting import Case, Row, Setting


def cases(setting: Setting) -> Iterator[Case]:
    """Yield the square products, the largest first, then the copy and the read."""
    for side in setting.pick((8192, 4096, 2048, 16384), (128, 64)):
        yield Case(f"product {side}", lambda side=side: product(side, setting), 3)
    yield Case("copy", lambda: copy(setting), 3)
    yield Case("read", lambda: read(setting), 3)


def product(side: int, setting: Setting) -> Row:
    """Time a square product of random bfloat16 numbers: 2 side³ FLOPs. Zeros would run faster."""
    a, b = (torch.randn(side, side, device=setting.device).to(torch.bfloat16) for _ in range(2))
    seconds = median(lambda: a @ b, setting)
    top = peak(setting)
    share = {} if top is None else {"share_of_data_sheet": round(square(side) / seconds / top, 4)}
    return told(seconds, square(side) / seconds / 1e12, "TFLOP/s") | share


def copy(setting: Setting) -> Row:
    """Time a copy within the device's memory; every byte is read once and written once."""
    source = torch.randint(0, 256, (setting.pick(2**32, 2**20),), dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    seconds = median(lambda: target.copy_(source), setting)
    return told(seconds, 2 * source.nbytes / seconds / 1e9, "GB/s")


def read(setting: Setting) -> Row:
    """Time the largest of many bfloat16 numbers; every byte is read once."""
    buffer = torch.randn(setting.pick(2**31, 2**19), device=setting.device, dtype=torch.bfloat16)
    seconds = median(buffer.amax, setting)
    return told(seconds, buffer.nbytes / seconds / 1e9, "GB/s")


def median(call: Callable[[], object], setting: Setting) -> float:
    return statistics.median(time_in_turn({"": call}, setting.pick(20, 2), 3, setting.device)[""])


def told(seconds: float, rate: float, unit: str) -> Row:
    return {"ms": round(seconds * 1e3, 4), "rate": float(f"{rate:.5g}"), "unit": unit}


def lines(rows: dict[str, Row]) -> list[str]:
    """Return every rate, in one line."""
    return [", ".join(f"{name} {row['rate']:,.4g} {row['unit']}" for name, row in rows.items())]

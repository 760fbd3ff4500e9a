"""Measure the limits of the card: bfloat16 products of several sizes, a copy, a read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from bare import median_times

from .roof import peak, square
from .setting import Case, Row, Setting


def cases(setting: Setting) -> Iterator[Case]:
    """Yield the square products, the largest first, then the copy and the read."""
    for side in setting.pick((8192, 4096, 2048, 16384), (128, 64)):
        yield Case(f"product {side}", partial(product, side, setting), 3)
    yield Case("copy", partial(copy, setting), 3)
    yield Case("read", partial(read, setting), 3)


def product(side: int, setting: Setting) -> Row:
    """Time a square product of random bfloat16 numbers. Zeros would run faster."""
    a, b = (torch.randn(side, side, device=setting.device).to(torch.bfloat16) for _ in range(2))
    row, top = timed(lambda: a @ b, square(side) / 1e12, "TFLOP/s", setting), peak(setting)
    return row if top is None else row | {"share_of_data_sheet": round(row["rate"] * 1e12 / top, 4)}


def copy(setting: Setting) -> Row:
    """Time a copy within the device's memory; every byte is read once and written once."""
    source = torch.randint(0, 256, (setting.pick(2**32, 2**20),), dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    return timed(lambda: target.copy_(source), 2 * source.nbytes / 1e9, "GB/s", setting)


def read(setting: Setting) -> Row:
    """Time the largest of many bfloat16 numbers; every byte is read once."""
    buffer = torch.randn(setting.pick(2**31, 2**19), device=setting.device, dtype=torch.bfloat16)
    return timed(buffer.amax, buffer.nbytes / 1e9, "GB/s", setting)


def timed(call: Callable[[], object], amount: float, unit: str, setting: Setting) -> Row:
    seconds = median_times({"": call}, setting.pick(20, 2), 3, setting.device)[""]
    return {"ms": round(seconds * 1e3, 4), "rate": float(f"{amount / seconds:.5g}"), "unit": unit}


def lines(rows: dict[str, Row]) -> list[str]:
    """Return every rate, in one line."""
    return [", ".join(f"{name} {row['rate']:,.4g} {row['unit']}" for name, row in rows.items())]
